"""The pages with an engine inside, in Chromium: what comes out is what comes out outside."""

import hashlib
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.playground.simulated import SimulatedRun
from tests.docs.browser import Browser, find_chromium
from tests.docs.site import build_once, served

pytestmark = pytest.mark.slow

PROMPTS = ["Once upon a time", "The little robot", "What is 2 plus 3?", "One day, 42 ants"]
WIDTHS = [(1280, False), (400, True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, with Pyodide in it."""
    find_chromium()  # before what takes long
    site = build_once(tmp_path_factory)
    if missing := json.loads((site / "play/engine/manifest.json").read_text())["missing"]:
        pytest.skip(f"the site is built without Pyodide: {missing}")
    return site


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(site):
    with served(site) as address:
        yield address


def loaded(browser, address, name, script):
    page = browser.open(f"{address}{name}", 1280, dark=False)
    page.value(script)
    return page


@pytest.fixture(scope="module")
def playground(browser, address):
    page = loaded(browser, address, "play/", "playground.load().then(() => true)")
    yield page
    page.close()


def status(page):
    return page.value("document.getElementById('status').textContent")


def counts_outside(settings):
    run = SimulatedRun(settings)
    while run.advance(100):
        pass
    return run.counts()


def test_nothing_is_loaded_before_the_click_and_less_than_15_mb_after(browser, address, site):
    """Catches 13 MB for everyone who only wanted to look."""
    page = browser.open(f"{address}play/", 1280, dark=False)
    assert not [url for url in page.requests if "pyodide" in url or "minipaged.zip" in url]
    page.close()
    sizes = json.loads((site / "play/engine/manifest.json").read_text())["files"]
    assert len(sizes) == 6
    assert sum(sizes.values()) < 15e6


def test_modules_that_python_starts_with_are_compiled_and_none_is_lost(site):
    """Catches two seconds of compiling at every visit, and an import that fails in the page alone."""
    with zipfile.ZipFile(site / "play/pyodide/python_stdlib.zip") as archive:
        names = archive.namelist()
    assert {"enum.pyc", "encodings/__init__.pyc", "_pyodide/_base.pyc"} <= set(names)
    version = json.loads((site / "play/engine/manifest.json").read_text())["version"]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minipaged"
    with (
        tarfile.open(cache / f"pyodide-{version}.tgz") as packed,
        zipfile.ZipFile(packed.extractfile("package/python_stdlib.zip")) as archive,
    ):
        sources = archive.namelist()
    assert [name[:-1] if name.endswith(".pyc") else name for name in names] == sources


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 20, "preemption_mode": "swap"}, {"samples": 4, "num_blocks": 64, "prefix": 32}],
    ids=str,
)
def test_a_run_in_the_page_has_the_counts_of_the_same_run_outside(playground, settings):
    """Catches an engine that is another one in the browser."""
    script = f"playground.run(Object.assign(playground.chosen(), {json.dumps(settings)}))"
    counts = playground.value(script)
    assert counts == pytest.approx(counts_outside(settings), rel=1e-12)
    seen = playground.value("playground.viewer.state()")
    assert seen["steps"] == counts["steps"]
    title = playground.value("document.querySelector('.mpv-title').textContent")
    assert status(playground).startswith(f"{counts['steps']} steps (0 to {title.split(' of ')[1]}). ")
    assert seen["counts"]["preemptions"] == counts["preemptions"]
    assert playground.problems == []


def test_the_address_holds_the_settings(browser, address):
    """Catches a link that shows somebody else another run."""
    page = browser.open(f"{address}play/#num_blocks=20&page_growth=reserve", 1280, dark=False)
    chosen = page.value("playground.chosen()")
    assert (chosen["num_blocks"], chosen["page_growth"], chosen["block_size"]) == (20, "reserve", 16)
    page.value(
        "(field => { field.value = 8; field.dispatchEvent(new Event('input', {bubbles: true})); })"
        "(document.querySelector('[name=block_size]'))"
    )
    assert page.value("location.hash") == "#block_size=8&num_blocks=20&page_growth=reserve"
    page.close()


def test_a_recorded_run_is_shown_until_there_is_one_of_the_readers(browser, address):
    """Catches a heading with nothing below it for everyone who has not loaded 14 MB."""
    page = browser.open(f"{address}play/", 400, dark=False)
    page.wait_for("playground.viewer.state().steps > 0")
    counts = counts_outside({"num_blocks": 24, "requests": 12, "rate": 4, "preemption_mode": "swap"})
    seen = page.value("playground.viewer.state()")
    assert (seen["steps"], seen["counts"]["preemptions"]) == (counts["steps"], counts["preemptions"])
    text = page.value("document.getElementById('viewer').innerText").partition("What happens")[2]
    assert "is preempted" in text
    assert not page.value("document.getElementById('recorded').hidden")
    page.value("playground.run({requests: 1, prompt: 1, output: 1}).then(() => true)")
    assert page.value("playground.viewer.state().steps") == 1
    assert page.value("document.getElementById('recorded').hidden")
    assert page.problems == []
    page.close()


def test_four_settings_are_in_sight_and_the_others_once_they_matter(browser, address):
    """Catches fifteen fields between "Load" and "Run" on a phone, and a setting of a link that is hidden."""
    fields = "[...document.querySelectorAll('#settings input, #settings select')]"
    shown = f"{fields}.filter(field => field.checkVisibility()).length"
    page = browser.open(f"{address}play/", 400, dark=False)
    assert page.value(shown) == 4
    page.value("document.querySelector('#settings summary').click()")
    assert page.value(shown) == 15
    page.value("location.hash = '#num_blocks=20'")
    page.wait_for("playground.chosen().num_blocks === 20")
    page.close()
    page = browser.open(f"{address}play/#page_growth=reserve", 400, dark=False)
    assert page.value(shown) == 15
    page.close()
    page = browser.open(f"{address}play/", 400, dark=False)
    page.value("document.querySelector('[name=block_size]').value = ''")
    page.value("document.getElementById('run').click()")
    assert page.value(shown) == 15, "a field that cannot be sent is out of sight"
    page.close()


def test_a_question_is_answered_by_the_engine(playground):
    """Catches a verdict that does not follow from the run."""
    playground.value("document.querySelectorAll('.question')[0].querySelectorAll('button')[0].click()")
    verdict = "document.querySelectorAll('.question')[0].querySelector('[role=status]').textContent"
    playground.wait_for(f"/preemptions/.test({verdict})")
    assert playground.value(verdict) == "Not so: 3 preemptions."
    playground.value("document.querySelectorAll('.question')[0].querySelectorAll('button')[1].click()")
    playground.wait_for(f"/Right/.test({verdict})")


def test_a_setting_that_cannot_work_is_reported_in_the_page(playground):
    """Catches a Python traceback in the status line, and an engine that is lost by a mistake."""
    assert playground.value("playground.run({...playground.chosen(), rate: 5000})") is None
    assert status(playground) == "rate is 5000; give a number from 0.01 to 1000"
    assert playground.value("playground.run({}).then(counts => counts.finished)") == 8


def test_why_no_request_fits_is_reported_where_run_was_pressed(playground):
    """Catches a pool blamed for another limit, a run no longer on show, a message out of sight."""
    counts = playground.value("playground.run({...playground.chosen(), samples: 8, max_num_seqs: 1})")
    assert (counts["finished"], counts["refused"]) == (0, 8)
    assert status(playground).startswith("8 of 8 requests can never run: ")
    assert "max_num_seqs" in status(playground)
    assert playground.value("playground.viewer.state().steps") == 0
    places = "['run', 'status'].map(id => document.getElementById(id).getBoundingClientRect().top)"
    run, reason = playground.value(places)
    assert 0 < reason - run < 100


def test_a_long_run_is_stopped_and_what_it_did_is_shown(playground):
    """Catches a minute of waiting for a run that nobody wants any more."""
    settings = {"requests": 200, "num_blocks": 4096, "output": 255, "samples": 8, "rate": 1000}
    playground.value(f"void playground.run(Object.assign(playground.chosen(), {json.dumps(settings)}))")
    playground.wait_for("/^[1-9]\\d* steps/.test(document.getElementById('status').textContent)")
    playground.value("document.getElementById('stop').click()")
    playground.wait_for("/^Stopped after/.test(document.getElementById('status').textContent)")
    steps = playground.value("playground.counts.steps")
    assert status(playground).startswith(f"Stopped after {steps} steps")
    assert playground.value("playground.counts.finished") < 200
    playground.wait_for("!playground.viewer.state().loading")
    assert playground.value("playground.viewer.state().steps") == steps
    assert playground.value("document.getElementById('stop').disabled")


def test_a_question_that_another_takes_over_does_not_wait_for_ever(playground):
    """Catches a verdict that goes on saying that the engine runs."""
    verdict = "document.querySelectorAll('.question')[{}].querySelector('[role=status]').textContent"
    for question in (1, 2):
        playground.value(
            f"document.querySelectorAll('.question')[{question}].querySelector('button').click()"
        )
    playground.wait_for(f"/^Not so/.test({verdict.format(2)})")
    assert playground.value(verdict.format(1)) == ""


def test_a_link_with_settings_that_cannot_be_is_reported_and_its_others_are_taken(browser, address):
    """Catches a form that cannot be sent, and does not say why."""
    link = "num_blocks=20&page_growth=foo&seed=1.5&block_size=many&requests=10000&evil=%3Cb%3E"
    page = browser.open(f"{address}play/#{link}", 1280, dark=False)
    assert page.value("document.getElementById('settings').checkValidity()")
    chosen = page.value("playground.chosen()")
    names = ("num_blocks", "page_growth", "seed", "block_size", "requests")
    assert [chosen[name] for name in names] == [20, "on_demand", 0, 16, 8]
    bad = "evil=<b>, block_size=many, page_growth=foo, requests=10000, seed=1.5"
    assert status(page) == f"The link has settings that cannot be taken: {bad}. The others are set."
    assert page.problems == []
    page.close()


def test_a_link_to_a_place_in_the_page_changes_no_setting(browser, address):
    """Catches "Skip to content" as a setting that cannot be: the others were lost with it."""
    page = browser.open(f"{address}play/#what-the-blocks-do", 1280, dark=False)
    assert status(page).startswith("Nothing is loaded yet.")
    page.value(
        "(field => { field.value = 20; field.dispatchEvent(new Event('input', {bubbles: true})); })"
        "(document.querySelector('[name=num_blocks]'))"
    )
    page.value("addEventListener('hashchange', () => { globalThis.moved = location.hash; })")
    page.value("document.querySelector('.md-skip').focus()")
    page.press("Enter")
    page.wait_for("globalThis.moved === '#playground'")
    assert page.value("playground.chosen().num_blocks") == 20
    assert status(page).startswith("Nothing is loaded yet.")
    page.close()


def test_what_was_wrong_with_a_link_is_forgotten_with_the_link(browser, address):
    """Catches an error beside a field that is right."""
    page = browser.open(f"{address}play/#num_blocks=20", 1280, dark=False)
    page.value("location.hash = '#num_blocks=abc'")
    page.wait_for("document.getElementById('status').textContent.includes('num_blocks=abc')")
    page.value("history.back()")
    page.wait_for("playground.chosen().num_blocks === 20")
    assert status(page) == ""
    page.close()


@pytest.fixture(scope="module")
def pocket(browser, address):
    page = browser.open(f"{address}play/pocket/", 1280, dark=False)
    yield page
    page.close()


def test_greedy_tokens_in_the_page_are_those_of_generate(pocket):
    """Catches a rounding, a rotation or a block table that is another one in JavaScript."""
    asked = json.dumps([{"text": text, "max_tokens": 60} for text in PROMPTS])
    pocket.value(f"Promise.all({asked}.map(pocket.ask)).then(() => true)")
    pocket.wait_for("!pocket.busy && Object.keys(pocket.tokens).length === 4")
    tokens, prompts = pocket.value("pocket.tokens"), pocket.value("pocket.prompts")
    llm = LLM()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60))
    for i, output in enumerate(outputs):
        assert prompts[str(i)] == list(output.prompt_token_ids)
        assert tokens[str(i)] == [list(output.outputs[0].token_ids)]
    shown = pocket.value("document.getElementById('answers').innerText")
    assert outputs[0].outputs[0].text.split("\n")[0] in shown
    assert pocket.problems == []


def test_what_changes_with_every_token_is_read_out_when_it_is_whole(pocket):
    """Catches a screen reader that says how many tokens there are, sixty times."""
    pocket.value(
        "(line => { globalThis.said = []; new MutationObserver(() => line.ariaBusy === 'true' ||"
        "said.push(line.textContent)).observe(line, {childList: true}); })(document.getElementById('status'))"
    )
    pocket.value("pocket.ask({text: 'Once', max_tokens: 12, temperature: 0, n: 1, beams: 1})")
    pocket.wait_for("!pocket.busy")
    assert [text.split(",")[0] for text in pocket.value("said") if "oad" not in text] == ["12 tokens"]


def test_beams_in_the_page_are_those_of_generate(pocket):
    """Catches beams that are drawn at random: all of them were one text, and not the best."""
    outputs = LLM().generate(PROMPTS, BeamSearchParams(beam_width=3, num_return_sequences=3, max_tokens=30))
    first = max(map(int, pocket.value("Object.keys(pocket.tokens)")), default=-1) + 1
    asked = json.dumps([{"text": text, "max_tokens": 30, "beams": 3} for text in PROMPTS])
    pocket.value(f"Promise.all({asked}.map(pocket.ask)).then(() => true)")
    pocket.wait_for(f"!pocket.busy && pocket.tokens[{first + 3}]")
    tokens = pocket.value("pocket.tokens")
    for i, output in enumerate(outputs):
        assert tokens[str(first + i)] == [list(completion.token_ids) for completion in output.outputs]
    assert pocket.problems == []


def test_what_the_browser_keeps_is_found_by_its_content(pocket, site):
    """Catches new weights, always as large as the old, that a browser which was here before never gets."""
    pocket.value("pocket.ask({text: 'Once', max_tokens: 1}).then(() => true)")
    pocket.wait_for("!pocket.busy")
    script = "caches.keys().then(async names => (await (await caches.open(names[0])).keys()).map(r => r.url))"
    kept = pocket.value(script)
    for name in ("engine/minipaged.zip", "weights/tokenizer.json", "weights/model.safetensors"):
        digest = hashlib.sha256((site / "play" / name).read_bytes()).hexdigest()[:16]
        assert [url.partition("?")[2] for url in kept if name in url] == [digest]


STEPS = """
(async () => {
  const { PocketModel } = await import("../model.js");
  const [config, weights] = await Promise.all([
    fetch("../weights/config.json").then((response) => response.json()),
    fetch("../weights/model.safetensors").then((response) => response.arrayBuffer()),
  ]);
  const lengths = [5, 1, 18, 2, 3, 17];
  const asked = () => lengths.map((length, i) => ({
    tokens: Array.from({ length }, (_, k) => 300 + 7 * i + k), start: 0, table: [20 - 3 * i, 2 + 3 * i],
    candidates: i === 1 ? 0 : 1, temperature: 0,
  }));
  const run = (apart) => {
    const model = new PocketModel(weights, config, 16, 24), all = [];
    const rows = asked();
    for (let step = 0; step < 5; step++) {
      const some = apart ? rows.map((row) => [row]) : [rows];
      const answers = some.flatMap((rows) => model.step({ swap_out: [], swap_in: [], copies: [], rows }));
      all.push(answers);
      let next = 0;
      for (const row of rows) {
        row.start += row.tokens.length;
        row.tokens = [row.candidates ? answers[next++][0][0] : 400];
        row.candidates = 1;
      }
    }
    return all;
  };
  return [run(true), run(false)];
})()
"""


def test_tokens_of_several_requests_computed_together_are_those_of_each_alone(pocket):
    """Catches tokens that take each other's rows, or attend before the keys beside them are written."""
    apart, together = pocket.value(STEPS)
    assert [len(step) for step in apart] == [5, 6, 6, 6, 6]
    for one, other in zip(apart, together, strict=True):
        for (tokens, logprobs), (expected, their_logprobs) in zip(other, one, strict=True):
            assert tokens == expected
            assert logprobs == pytest.approx(their_logprobs, abs=1e-4)


def test_one_of_a_kind_is_described_as_one(playground, pocket):
    """Catches "1 tokens"."""
    pocket.value("pocket.ask({text: 'Once', max_tokens: 1}).then(() => true)")
    pocket.wait_for("!pocket.busy")
    assert status(pocket).startswith("1 token, ")
    playground.value("playground.run({requests: 1, prompt: 1, output: 1})")
    assert status(playground).startswith("1 step. ")


def test_prompts_with_the_same_beginning_share_its_blocks(pocket):
    """Catches a prefix cache that the viewer does not get, or whose blocks hold nothing."""
    text = "Once upon a time, there was a little boy named Otto. He lived in a valley between two mountains."
    before = pocket.value("pocket.viewer.state().counts.hits")
    for _ in range(2):
        pocket.value(f"pocket.ask({{text: {json.dumps(text)}, max_tokens: 8}}).then(() => true)")
        pocket.wait_for("!pocket.busy")
    tokens = list(pocket.value("pocket.tokens").values())
    assert tokens[-1] == tokens[-2]
    assert pocket.value("pocket.viewer.state().counts.hits") > before


def test_a_refused_prompt_is_reported_in_its_place_and_one_of_four_is_stopped(pocket):
    """Catches a refusal that the next step's figures wipe away, and a stop that ends every answer."""
    pocket.value("document.getElementById('answers').replaceChildren()")
    first = max(map(int, pocket.value("Object.keys(pocket.tokens)"))) + 1
    asked = json.dumps([{"text": f"Once upon {i}", "max_tokens": 150} for i in range(4)])
    long = json.dumps({"text": "x" * 5000, "max_tokens": 5})
    pocket.value(f"[...{asked}, {long}].map(pocket.ask).length")
    stop = f"[...document.querySelectorAll('.answer button')].find(b => b.textContent === 'Stop {first + 1}')"
    pocket.wait_for(stop)
    pocket.value(f"{stop}.click()")
    pocket.wait_for("!pocket.busy")
    tokens = pocket.value("pocket.tokens")
    ended = tokens.get(str(first + 1), [[]])[0]
    assert len(ended) < 150
    for i in (0, 2, 3):
        assert len(tokens[str(first + i)][0]) > max(20, len(ended))
    shown = pocket.value("[...document.querySelectorAll('.answer')].map(each => each.innerText)")
    assert len(shown) == 5
    assert shown[0].startswith("…xxx")
    assert "the prompt has 5001 tokens" in shown[0]
    assert len(shown[0]) < 600
    assert pocket.value("document.querySelectorAll('.answer button').length") == 0
    assert pocket.problems == []


def test_the_button_loads_the_model_too_and_then_the_network_may_go(browser, address):
    """Catches weights asked for at the first prompt, and a page that still says "loading" afterwards."""
    page = browser.open(f"{address}play/pocket/", 400, dark=False)
    page.value("document.getElementById('load').click()")
    page.wait_for("document.getElementById('load').parentElement.hidden")
    assert status(page) == "Loaded."
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.call("Network.emulateNetworkConditions", offline, page.session)
    asked = len(page.requests)
    page.value("document.getElementById('send').click()")
    page.wait_for("!pocket.busy && pocket.tokens[0]?.[0].length === 60")
    assert page.requests[asked:] == []
    page.close()


def test_what_is_stopped_while_the_model_loads_is_not_written(browser, address):
    """Catches a text that is written although it was stopped, and a page that then writes none at all."""
    page = browser.open(f"{address}play/pocket/", 1280, dark=False)
    page.value("document.getElementById('send').click()")
    page.value("document.getElementById('stop').click()")
    page.wait_for("document.getElementById('load').parentElement.hidden")
    page.value("pocket.ask({text: 'The little robot', max_tokens: 8}).then(() => true)")
    page.wait_for("!pocket.busy && pocket.tokens[0]?.[0].length === 8")
    assert page.value("document.querySelectorAll('.answer').length") == 1
    assert page.problems == []
    page.close()


@pytest.mark.parametrize("name", ["play/", "play/pocket/", "learn/02_allocator/"])
def test_without_scripts_a_page_says_what_to_do_instead_where_its_button_is(name, browser, address):
    """Catches a button that does nothing, and a reader who is sent away."""
    page = browser.open("about:blank", 1280, dark=False)
    browser.call("Emulation.setScriptExecutionDisabled", {"value": True}, page.session)
    page.loaded = False
    browser.call("Page.navigate", {"url": address + name}, page.session)
    browser.wait_until_loaded(page)
    text = page.value("document.querySelector('noscript').innerText")
    assert "needs JavaScript" in text
    assert "without" in text or "minipaged learn check 02" in text
    gap = "document.querySelector('noscript p').getBoundingClientRect().top - document.querySelector("
    assert page.value(gap + "'.md-typeset button.md-button').getBoundingClientRect().bottom") < 120
    page.close()


@pytest.mark.parametrize("name", ["play/", "play/pocket/"])
def test_the_button_keeps_the_focus_when_there_is_no_network(name, browser, address):
    """Catches a keyboard that begins at the top of the page again after each attempt."""
    page = browser.open(address + name, 1280, dark=False)
    page.value(
        "globalThis.Worker = class { constructor() { setTimeout(() => this.onerror({}), 200); }"
        "postMessage() {} terminate() {} }; document.getElementById('load').focus()"
    )
    page.press("Enter")
    page.wait_for("document.getElementById('status').dataset.state === 'failed'")
    assert page.value("document.activeElement.id") == "load"
    page.press("Enter")
    page.value("document.querySelector('.md-content a').focus()")  # while it loads
    page.wait_for("!document.getElementById('load').disabled")
    assert page.value("document.activeElement.matches('.md-content a')"), "taken from a reader who went on"
    page.close()


def test_a_site_without_pyodide_says_what_is_missing(browser, site, tmp_path):
    """Catches a button that does nothing where npm could not fetch Pyodide."""
    target = tmp_path / "site"
    for file in site.rglob("*"):
        name = file.relative_to(site)
        if file.is_file() and name.parts[:2] != ("play", "pyodide"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(file)
    manifest = target / "play/engine/manifest.json"
    manifest.unlink()
    manifest.write_text(json.dumps({"version": "0", "files": {}, "missing": "npm is not installed"}))
    with served(target) as address:
        page = browser.open(f"{address}play/", 1280, dark=False)
        page.value("playground.load().catch(() => true)")
        assert "npm is not installed" in status(page)
        page.close()
