// The page of a server: prompts on one side, the memory on the other. Addresses are relative to the page, so that
// it also works behind a prefix. Answers only ever become text nodes.

import { mountViewer } from "./viewer.js";
import { themeButton } from "./theme.js";

const at = (id) => document.getElementById(id);
const KEPT_ANSWERS = 6;
const LONGEST = 300; // letters of a prompt above its answer
const AGAIN = 2000; // milliseconds until the server is asked again
const HIDDEN = 5000; // milliseconds that a hidden page keeps its stream

themeButton(at("theme"));
const viewer = (globalThis.viewer = mountViewer(at("viewer")));

// -- the server ---------------------------------------------------------------------------------------------

class WrongKey extends Error {}

const reached = (promise) => promise.catch(() => Promise.reject(Error("the server cannot be reached")));

// The server's answer, or why there is none; a server that wants a key gets the field for it shown.
async function call(address, options) {
  const key = at("key").value;
  if (/[^!-~]/.test(key)) throw new WrongKey("the key has characters that a key cannot have");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await reached(fetch(address, { headers, ...options }));
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const message = answer?.error?.message ?? `the server answers ${response.status}`;
  if (response.status !== 401) throw Error(message);
  at("key-part").hidden = false;
  throw new WrongKey(message);
}

// The data of server-sent events as they arrive.
async function* events(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

// -- the memory ---------------------------------------------------------------------------------------------

// A server's names of requests are long; here they are numbers, in the order in which they appear.
const numbers = new Map();
const numberOf = (name) => {
  if (!numbers.has(name)) numbers.set(name, String(numbers.size + 1));
  return numbers.get(name);
};

function show(data) {
  const line = JSON.parse(data.replace(/\b(?:cmpl-|chatcmpl-|resp_)(?:[\w.:-]{1,80}-)?[0-9a-f]{32}-\d+\b/g, numberOf));
  if (line?.format !== undefined) viewer.start(line, "committed");
  else viewer.append(line);
}

const after = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const keyChange = () => new Promise((done) => at("key").addEventListener("change", done, { once: true }));

const untilShown = () => new Promise((done) => document.hidden ? document.addEventListener("visibilitychange", done, { once: true }) : done());

// A browser opens few connections to a host, and a stream keeps one: a page that stays hidden gives its own back.
let stream = new AbortController();
let release;
document.addEventListener("visibilitychange", () => {
  clearTimeout(release);
  if (document.hidden) release = setTimeout(() => stream.abort(), HIDDEN);
});

// Again and again: until the key is right, after a server that ends, after a network that breaks.
async function watch() {
  for (;;) {
    await untilShown();
    let again = () => after(AGAIN);
    stream = new AbortController();
    try {
      const response = await call("trace/live", { signal: stream.signal });
      if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) throw Error("it sends no steps; is it minipaged serve?");
      at("status").textContent = "connected";
      for await (const data of events(response)) show(data);
      at("status").textContent = "the server has ended; connecting again";
    } catch (error) {
      at("status").textContent = stream.signal.aborted ? "paused while the page is hidden" : `not connected: ${error.message}`;
      if (stream.signal.aborted) again = untilShown;
      else if (error instanceof WrongKey) again = keyChange;
    }
    await again();
  }
}

// -- a prompt -----------------------------------------------------------------------------------------------

const asking = new Set(); // what can be stopped

async function ask(prompt, maxTokens, completions) {
  const texts = Array.from({ length: completions || 1 }, () => {
    const answer = document.createElement("p");
    const number = document.createElement("span");
    const asked = document.createElement("b");
    number.className = "mpv-chip";
    number.hidden = true;
    asked.textContent = prompt.length > LONGEST ? `…${prompt.slice(-LONGEST)}` : prompt;
    answer.append(number, asked, document.createTextNode(""));
    return answer;
  });
  at("answers").prepend(...texts);
  while (at("answers").children.length > Math.max(KEPT_ANSWERS, completions)) at("answers").lastChild.remove();
  // The number is that of its table, as the viewer names it.
  const write = (answer, id, { index, text }) => {
    answer.firstChild.hidden = id === undefined;
    if (id !== undefined) answer.firstChild.textContent = `${numberOf(`${id}-0`)}${completions > 1 ? `.${index + 1}` : ""}`;
    answer.lastChild.data += text ?? "";
  };
  const unfinished = new Set(texts);
  const fail = (message) => {
    for (const answer of unfinished) {
      answer.lastChild.data += ` [${message}]`;
      answer.dataset.state = "failed";
    }
  };
  const stop = new AbortController();
  asking.add(stop);
  at("stop").disabled = false;
  at("answers").ariaBusy = "true"; // read out when it is whole
  try {
    const body = { prompt, max_tokens: maxTokens, n: completions, stream: true };
    const response = await call("v1/completions", { method: "POST", body: JSON.stringify(body), signal: stop.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) fail(piece.error.message ?? "the server reports an error");
      for (const choice of piece.choices ?? []) {
        const answer = texts[choice.index];
        if (answer) write(answer, piece.id, choice);
        if (choice.finish_reason) unfinished.delete(answer);
      }
    }
    fail("the answer was cut off");
  } catch (error) {
    fail(stop.signal.aborted ? "stopped" : error.message);
  } finally {
    asking.delete(stop);
    at("stop").disabled = !asking.size;
    at("answers").ariaBusy = String(asking.size > 0);
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(at("prompt").value, Number(at("max_tokens").value), Number(at("n").value));
});
at("stop").addEventListener("click", () => asking.forEach((stop) => stop.abort()));
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});

watch();
