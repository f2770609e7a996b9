// The pocket model: prompts in, text as it is written, and the blocks that it takes.

import { EngineWorker, at, element, tell } from "./engine.js";
import { mountViewer } from "./viewer/viewer.js";

const viewer = mountViewer(at("viewer"), { baseUrl: "../../" });
const KEPT = 8;

const form = at("ask");
const number = (name, label, value, least, most) =>
  element("label", {}, label, element("input", { type: "number", name, value, min: least, max: most, required: true }));
form.append(
  element("label", { className: "wide" }, "Prompt", element("input", { name: "prompt", value: "Once upon a time", required: true })),
  number("max_tokens", "Tokens at most", 60, 1, 500),
  number("n", "Samples", 1, 1, 4),
  number("beams", "Beams (1: none)", 1, 1, 4),
  element("label", {}, "Temperature (0: the likeliest)", element("input", { type: "number", name: "temperature", value: 0, min: 0, max: 2, step: 0.1, required: true })),
  element("div", { className: "buttons" },
    element("button", { className: "small", id: "send", textContent: "Write" }),
    element("button", { className: "small", type: "button", id: "stop", textContent: "Stop" })),
);

const answers = new Map(); // request id -> the paragraphs of its texts
const asked = []; // prompts that have no id yet
let started = 0, before = 0; // of this burst: its time, and the tokens written until then

let writing = false;
const count = () => Object.values(results.tokens).flat().reduce((sum, each) => sum + each.length, 0);

const results = (globalThis.pocket = { viewer, tokens: {}, prompts: {}, busy: false });

function feed(lines) {
  for (const text of lines) {
    const line = JSON.parse(text);
    if (line.format !== undefined) viewer.start(line);
    else viewer.append(line);
  }
}

const engine = new EngineWorker((message) => {
  if (message.error) {
    asked.shift();
    results.busy = false;
    tell(message.error, true);
  } else if (message.opened) feed(message.lines);
  else if (message.added) {
    if (!writing) [started, before] = [performance.now(), count()];
    writing = true;
    answers.set(message.added, { prompt: asked.shift(), paragraphs: [] });
    results.prompts[message.added] = message.prompt_token_ids;
  } else if (message.step) step(message.step);
});

function step({ lines, outputs, texts, more }) {
  feed(lines);
  for (const [id, each] of Object.entries(outputs)) {
    results.tokens[id] = each;
    const { prompt, paragraphs } = answers.get(id);
    texts[id].forEach((text, i) => {
      if (!paragraphs[i]) {
        paragraphs[i] = element("p", {}, element("b", { textContent: prompt }), "");
        at("answers").prepend(paragraphs[i]);
        while (at("answers").children.length > KEPT) at("answers").lastChild.remove();
      }
      paragraphs[i].lastChild.data = text;
    });
  }
  const tokens = count() - before;
  const rate = tokens / ((performance.now() - started) / 1000);
  tell(`${tokens} tokens, ${rate.toFixed(0)} a second${more ? " ..." : "."}`);
  results.rate = rate;
  results.busy = writing = more;
}

let opened;
async function ask(options) {
  await engine.load();
  opened ??= engine.send({ call: "open", settings: { block_size: 16, num_blocks: 64 } });
  await opened;
  results.busy = true;
  asked.push(options.text);
  await engine.send({ call: "prompt", ...options });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const value = (name) => Number(form.elements[name].value);
  const [beams, temperature] = [value("beams"), value("temperature")];
  ask({ text: form.elements.prompt.value, max_tokens: value("max_tokens"), temperature, n: value("n"), beams }).catch(() => {});
});
at("stop").addEventListener("click", () => engine.ready && engine.send({ call: "stop" }));
results.ask = ask;
