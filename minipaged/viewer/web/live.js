// The page of a server: prompts on one side, the memory on the other. Addresses are relative to the page, so that
// it also works behind a prefix. Answers only ever become text nodes.

import { mountViewer } from "./viewer.js";
import { themeButton } from "./theme.js";

const at = (id) => document.getElementById(id);
const KEPT_ANSWERS = 6;

themeButton(at("theme"));
const viewer = (globalThis.viewer = mountViewer(at("viewer")));

// -- the memory ---------------------------------------------------------------------------------------------

const source = new EventSource("trace/live");
source.onopen = () => (at("status").textContent = "connected");
source.onerror = () =>
  (at("status").textContent = source.readyState === EventSource.CLOSED ? "the server sends no steps; is it minipaged serve?" : "connecting again");
source.onmessage = ({ data }) => {
  let line;
  try {
    line = JSON.parse(data);
  } catch {
    at("status").textContent = "the server sent a step that is not JSON";
    return;
  }
  if (line?.format !== undefined) viewer.start(line);
  else viewer.append(line);
};

// -- a prompt -----------------------------------------------------------------------------------------------

// The data of server-sent events as they arrive.
async function* events(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

async function ask(prompt, maxTokens, completions) {
  const texts = Array.from({ length: completions }, () => {
    const answer = document.createElement("p");
    const asked = document.createElement("b");
    asked.textContent = prompt;
    answer.append(asked, document.createTextNode(""));
    return answer;
  });
  at("answers").prepend(...texts);
  while (at("answers").children.length > Math.max(KEPT_ANSWERS, completions)) at("answers").lastChild.remove();
  const fail = (message) => {
    texts[0].lastChild.data += ` [${message}]`;
    texts[0].dataset.state = "failed";
  };
  try {
    const body = { prompt, max_tokens: maxTokens, n: completions, stream: true };
    const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const response = await fetch("v1/completions", request);
    if (!response.ok) {
      const told = await response.json().catch(() => null);
      fail(told?.error?.message ?? `the server answers ${response.status}`);
      return;
    }
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const piece = JSON.parse(data);
      if (piece.error) fail(piece.error.message ?? "the server reports an error");
      for (const choice of piece.choices ?? []) if (texts[choice.index]) texts[choice.index].lastChild.data += choice.text ?? "";
    }
  } catch (error) {
    fail(error.message);
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(at("prompt").value, Number(at("max_tokens").value), Number(at("n").value));
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});
