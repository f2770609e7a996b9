// The engine's thread: Pyodide with the package `minipaged`, and for the pocket model its computations.
//
//     in    {call: "load"}                        out   {loaded, total}... {ready: true}
//           {call: "simulate", id, settings}            {id, lines}... {id, counts, refusal, stopped}
//           {call: "prompt", id, text, ...}             {id, added: "0"}, then {step} for every step
//           {call: "stop", request}                     (without a request: all, and the simulation)
//           {call: "check", id, number, source}         {id, test}... {id, report}
//           {call: "run", id, number, source, demo}     {id, run}
//
// {call: "load", lessons: true} loads the lessons' tests, too; {model: true} the pocket model: {opened: true, lines}.
//
// What goes wrong comes back as {id, error}: one line.

import { PocketModel } from "./model.js";
import { Tokenizer } from "./tokenizer.js";

const here = new URL(".", import.meta.url);
const at = (name) => new URL(name, here).href;
const MODEL = ["config.json", "tokenizer.json", "model.safetensors"].map((name) => `weights/${name}`);
const POOL = { block_size: 16, num_blocks: 64 };
let python, simulated, lessons, run, current;
let tokenizer;

// Every download is counted for the progress bar and kept for the next visit, by version.
async function countedFetch(version, tell) {
  const plain = self.fetch.bind(self);
  const cache = await caches.open(`minipaged ${version}`).catch(() => null);
  return async (request, options) => {
    const address = typeof request === "string" ? request : request.url ?? String(request);
    let response = await cache?.match(address);
    if (!response) {
      response = await plain(request, options);
      if (!response.ok) throw new Error(`${response.status} for ${address}`);
      cache?.put(address, response.clone()).catch(() => {}); // beside, so that WebAssembly compiles as it arrives
    }
    const count = new TransformStream({
      transform(piece, out) {
        tell(piece.byteLength);
        out.enqueue(piece);
      },
    });
    return new Response(response.body.pipeThrough(count), { headers: { "Content-Type": response.headers.get("Content-Type") ?? "" } });
  };
}

async function load({ lessons: withLessons, model: withModel }) {
  const manifest = await (await fetch(at("engine/manifest.json"), { cache: "no-cache" })).json();
  if (manifest.missing) throw new Error(`This copy of the site was built without Pyodide: ${manifest.missing}.`);
  if (withLessons && manifest.lessons.missing) throw new Error(`This copy of the site was built without the lessons' tests: ${manifest.lessons.missing}.`);
  const archives = ["engine/minipaged.zip", ...(withLessons ? ["lessons/lessons.zip"] : [])];
  const weights = withModel ? MODEL : [];
  const sizes = { ...manifest.files, ...manifest.lessons.files, ...manifest.weights };
  const total = [...Object.keys(manifest.files), ...archives.slice(1), ...weights].reduce((sum, name) => sum + sizes[name], 0);
  let loaded = 0;
  const tell = (bytes) => postMessage({ loaded: (loaded += bytes), total });
  const plain = self.fetch;
  self.fetch = await countedFetch(manifest.version, tell);
  let model;
  try {
    // The project's own files change with every build: they are asked for by their content, too.
    const read = (name) => self.fetch(`${at(name)}?${manifest.digests[name]}`).then((response) => response.arrayBuffer());
    const [{ loadPyodide }, , ...buffers] = await Promise.all([
      import(at("pyodide/pyodide.mjs")),
      import(at("pyodide/pyodide.asm.mjs")),
      ...[...archives, ...weights].map(read),
    ]);
    model = buffers.splice(archives.length);
    python = await loadPyodide({ indexURL: at("pyodide/") });
    for (const buffer of buffers) python.unpackArchive(buffer, "zip", { extractDir: "/engine" });
  } finally {
    self.fetch = plain;
  }
  python.runPython("import sys; sys.path.insert(0, '/engine')");
  if (withLessons) {
    python.pyimport("pytest");
    lessons = python.pyimport("minipaged.playground.lessons");
  } else if (withModel) open(...model);
  else simulated = python.pyimport("minipaged.playground.simulated");
  postMessage({ loaded: total, total });
  postMessage({ ready: true });
}

// Lets waiting messages in. (A chain of timeouts would wait 4 ms each time.)
const channel = new MessageChannel();
const pause = () =>
  new Promise((done) => {
    channel.port1.onmessage = done;
    channel.port2.postMessage(null);
  });

const lastLine = (error) => String(error.message ?? error).trim().split("\n").pop().replace(/^NotImplementedError: /, "Not written yet. ").replace(/^[\w.]+(Error|Exception): /, "");

async function simulate(id, settings) {
  current = id;
  const given = python.toPy(settings);
  const proxy = simulated.SimulatedRun(given);
  try {
    for (;;) {
      const list = proxy.advance(40);
      const lines = list.toJs();
      list.destroy();
      if (!lines.length) break;
      postMessage({ id, lines });
      await pause();
      if (current === null) break; // stopped
      if (current !== id) return; // another run has begun
    }
    const counts = proxy.counts();
    postMessage({ id, counts: counts.toJs({ dict_converter: Object.fromEntries }), refusal: proxy.refusal, stopped: current === null });
    counts.destroy();
  } finally {
    proxy.destroy();
    given.destroy();
  }
}

// ---- the lessons ------------------------------------------------------------------------------------------

function check({ id, number, source }) {
  python.setStdout({ batched: () => {} }); // pytest reports there what the page says in other words
  try {
    postMessage({ id, report: JSON.parse(lessons.check(number, source, (test) => postMessage({ id, test }))) });
  } finally {
    python.setStdout();
  }
}

const demonstrate = ({ id, number, source, demo }) => postMessage({ id, run: JSON.parse(lessons.run(number, source, demo)) });

// ---- the pocket model -------------------------------------------------------------------------------------

function open(...files) {
  const [config, vocabulary] = files.slice(0, 2).map((buffer) => JSON.parse(new TextDecoder().decode(buffer)));
  tokenizer = new Tokenizer(vocabulary);
  const model = new PocketModel(files[2], config, POOL.block_size, POOL.num_blocks);
  const limits = {
    max_model_len: config.max_position_embeddings,
    vocab_size: config.vocab_size,
    eos_token_ids: [config.eos_token_id],
    block_bytes: model.blockBytes,
  };
  const compute = (step) => JSON.stringify(model.step(JSON.parse(step)));
  run = python.pyimport("minipaged.playground.pocket").PocketRun(
    compute, python.toPy(limits), python.toPy(tokenizer.texts()), python.toPy(POOL),
  );
  postMessage({ opened: true, ...JSON.parse(run.step()) });
}

let stepping = false;
function prompt({ id, text, max_tokens, temperature = 0, n = 1, beams = 1 }) {
  const ids = tokenizer.encode(text);
  const added = run.add(python.toPy(ids), max_tokens, temperature, n, beams);
  postMessage({ id, added, prompt_token_ids: ids });
  if (!stepping) steps();
}

async function steps() {
  stepping = true;
  try {
    for (let more = true; more; ) {
      const step = JSON.parse(run.step());
      more = step.more;
      step.texts = Object.fromEntries(
        Object.entries(step.outputs).map(([id, outputs]) => [id, outputs.map((tokens) => tokenizer.decode(tokens))]),
      );
      postMessage({ step });
      await pause();
    }
  } catch (error) {
    run.abort();
    postMessage({ error: lastLine(error) });
  } finally {
    stepping = false;
  }
}

// Whether Python itself has ended: a student's class may exit, or recurse too deep.
function hasEnded() {
  try {
    python?.runPython("");
    return false;
  } catch {
    return true;
  }
}

onmessage = async ({ data }) => {
  try {
    if (data.call === "load") await load(data);
    else if (data.call === "check") check(data);
    else if (data.call === "run") demonstrate(data);
    else if (data.call === "simulate") await simulate(data.id, data.settings);
    else if (data.call === "prompt") prompt(data);
    else if (data.call === "stop") {
      current = null;
      run?.abort(...(data.request === undefined ? [] : [data.request]));
    }
  } catch (error) {
    const dead = hasEnded();
    postMessage({ id: data.id, error: dead ? "Python itself has ended in this page, by an exit or an endless recursion; it is loaded anew." : lastLine(error), dead });
  }
};
