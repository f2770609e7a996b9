// The pocket model: prompts in, text as it is written, and the blocks that it takes.

import { EngineWorker, at, counted, element, tell } from "./engine.js";
import { mountViewer } from "../javascripts/viewer/viewer.js";

const viewer = mountViewer(at("viewer"), { baseUrl: "../../" });
const KEPT = 8; // answers
const LONGEST = 300; // letters of a prompt above its answer

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
    element("button", { className: "small", type: "button", id: "stop", textContent: "Stop all" })),
);

const sent = new Map(); // our number of a prompt that has no request yet -> its answer
const answers = new Map(); // request that runs -> its answer: {box, prompt, stop, paragraphs}
let last = 0;
let started = 0, before = 0; // of this burst: its time, and the tokens written until then
let writing = false;
const count = () => Object.values(results.tokens).flat().reduce((sum, each) => sum + each.length, 0);

const results = (globalThis.pocket = { viewer, tokens: {}, prompts: {}, busy: false });

function feed(lines) {
  for (const text of lines) {
    const line = JSON.parse(text);
    if (line.format !== undefined) viewer.start(line, "committed");
    else viewer.append(line);
  }
}

const engine = new EngineWorker((message) => {
  if (message.error) refuse(message);
  else if (message.opened) feed(message.lines);
  else if (message.added) added(message);
  else if (message.step) step(message.step);
}, { model: true });

// ---- answers -----------------------------------------------------------------------------------------------

// Of a long prompt the end, to which the answer belongs.
const shown = (text) => (text.length > LONGEST ? `…${text.slice(-LONGEST)}` : text);

function begin(prompt) {
  const box = element("div", { className: "answer" }, element("p", {}, element("b", { textContent: shown(prompt) }), " ..."));
  at("answers").prepend(box);
  while (at("answers").children.length > KEPT) at("answers").lastChild.remove();
  return { box, prompt, paragraphs: [] };
}

function added({ id, added: request, prompt_token_ids }) {
  if (!writing) [started, before] = [performance.now(), count()];
  writing = results.busy = true;
  const answer = sent.get(id);
  sent.delete(id);
  answer.stop = element("button", { className: "small", type: "button", textContent: `Stop ${request}` });
  answer.stop.addEventListener("click", () => engine.send({ call: "stop", request }));
  answer.box.replaceChildren(answer.stop);
  answers.set(request, answer);
  results.prompts[request] = prompt_token_ids;
}

// A refusal stands where the answer would; what else goes wrong ends all of them.
function refuse({ id, error }) {
  const answer = sent.get(id);
  sent.delete(id);
  if (answer) answer.box.lastChild.lastChild.data = ` ${error}`;
  else {
    for (const request of answers.keys()) end(request);
    writing = false;
  }
  busy(writing);
  if (!writing) tell(error, true);
}

// What changes with every token is read out when it is whole.
function busy(more) {
  results.busy = writing = more;
  for (const id of ["status", "answers"]) at(id).ariaBusy = String(more);
}

function end(request) {
  answers.get(request).stop.remove();
  answers.delete(request);
}

function step({ lines, outputs, texts, running, more }) {
  feed(lines);
  for (const [request, each] of Object.entries(outputs)) {
    results.tokens[request] = each;
    const { box, prompt, stop, paragraphs } = answers.get(request);
    texts[request].forEach((text, i) => {
      if (!paragraphs[i]) {
        const name = each.length > 1 ? `${request}.${i + 1}` : request; // as in the viewer
        paragraphs[i] = element("p", {}, element("span", { className: "request", textContent: name }), " ", element("b", { textContent: shown(prompt) }), "");
        stop.before(paragraphs[i]);
      }
      paragraphs[i].lastChild.data = text;
    });
  }
  for (const request of [...answers.keys()]) if (!running.includes(request)) end(request);
  const tokens = count() - before;
  const rate = tokens / ((performance.now() - started) / 1000);
  busy(more);
  tell(`${counted(tokens, "token")}, ${rate.toFixed(0)} per second${more ? " ..." : "."}`);
  results.rate = rate;
}

let stopped = 0; // how often all were
async function ask(options) {
  const then = stopped;
  await engine.load();
  if (stopped > then) return;
  results.busy = true;
  sent.set(++last, begin(options.text));
  await engine.send({ call: "prompt", id: last, ...options });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const value = (name) => Number(form.elements[name].value);
  const [beams, temperature] = [value("beams"), value("temperature")];
  ask({ text: form.elements.prompt.value, max_tokens: value("max_tokens"), temperature, n: value("n"), beams }).catch(() => {});
});
at("stop").addEventListener("click", () => {
  stopped++;
  if (engine.ready) engine.send({ call: "stop" });
});
results.ask = ask;
