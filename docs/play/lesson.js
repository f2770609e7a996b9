// A lesson's exercise in its own page: an editor beside the text, the lesson's tests, and the engine with the
// student's classes in the viewer. What is written stays in this browser. Nothing is loaded before the first click.

import { EngineWorker, counted, element } from "./engine.js";

const box = document.querySelector(".lesson");
const { number, name } = box.dataset;
const demos = JSON.parse(box.dataset.demos);
const open = box.querySelector("button");
const place = (file) => new URL(file, import.meta.url).href;
const SECONDS = 10; // of a test, and of a run
const LOADING = 30; // of what comes before the first test

// ---- what was written --------------------------------------------------------------------------------------

const KEY = `minipaged ${new URL("..", import.meta.url).pathname} ${name}`;
const kept = {
  read() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  },
  // Whether it could be kept.
  write(text) {
    try {
      if (text === null) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, text);
      return true;
    } catch {
      return false;
    }
  },
};
if (kept.read() !== null) open.textContent = "Go on with what you have written";

// ---- the panel ---------------------------------------------------------------------------------------------

const small = (textContent, onclick, properties = {}) => element("button", { className: "small", type: "button", textContent, onclick, ...properties });
const progress = element("progress", { max: 1, value: 0, hidden: true, ariaLabel: "Loading" });
const status = element("p", { className: "lesson-status" });
status.setAttribute("role", "status");
const editorBox = element("div", { className: "lesson-editor" });
const results = element("div", { className: "lesson-results" });
const stage = element("div", { className: "play-viewer" });
const again = small("Reset", () => ask(true));
const question = element("div", { className: "buttons", role: "alert", hidden: true },
  element("span", { textContent: "Throw away what you have written?" }),
  small("Begin anew", () => (reset(), editor.focus())), small("Keep it", () => (ask(false), again.focus())));
const conflict = element("div", { className: "buttons", role: "alert", hidden: true },
  element("span", { textContent: "Another tab has written something else, too." }),
  small("Keep this one", () => (overwrite(), editor.focus())), small("Take the other one", () => (take(kept.read()), editor.focus())));
const which = element("select", { ariaLabel: "Which run", hidden: demos.length < 2 }, ...demos.map((text, value) => element("option", { value, textContent: text })));
const stop = small("Stop", () => end("Stopped."), { hidden: true });
const panel = element("section", { className: "lesson-panel", hidden: true, ariaLabel: "Your exercise" },
  element("div", { className: "buttons" },
    small("Check", () => check(), { title: "Ctrl-Enter" }),
    small("Run the engine with it", () => run()), which, stop,
    element("span", { className: "lesson-space" }),
    small("Download", () => download(), { title: "exercise.py" }), again, small("Close", () => close())),
  conflict, question, progress, status, editorBox, results, stage);

const say = (text, failed = false) => {
  status.textContent = text;
  status.dataset.state = failed ? "failed" : "";
};

let start, editor, viewer, saving;
let known; // what this tab last read or wrote; null: nothing was kept

async function show() {
  const told = box.querySelector("p[role=status]");
  const focused = document.activeElement === open;
  open.disabled = true;
  told.textContent = "";
  try {
    if (!editor) {
      const manifest = await (await fetch(place("engine/manifest.json"), { cache: "no-cache" })).json();
      if (manifest.lessons.missing) throw new Error(`This copy of the site was built without the editor: ${manifest.lessons.missing}.`);
      const [{ openEditor }, answer] = await Promise.all([
        import(`${place("lessons/editor.js")}?${manifest.digests["lessons/editor.js"]}`),
        fetch(place(`lessons/${name}.txt`), { cache: "no-cache" }),
      ]);
      if (!answer.ok) throw new Error(`${answer.status} for the exercise`);
      start = await answer.text();
      box.append(panel);
      const keys = [{ key: "Ctrl-Enter", run: () => (check(), true) }];
      known = kept.read();
      editor = openEditor(editorBox, { text: known ?? start, label: "exercise.py", onchange, keys });
      say("What you write is kept in this browser and sent nowhere. Tab indents; Esc, then Tab leaves the editor.");
    }
    squeeze(true);
    editor.focus();
  } catch (error) {
    const unreached = error instanceof TypeError; // of fetch and import
    told.textContent = unreached ? "The editor cannot be loaded; check the connection and try again." : error.message;
  }
  open.disabled = false;
  if (focused && panel.hidden && document.activeElement === document.body) open.focus(); // a disabled button loses it
}

// On a wide screen the text makes room.
function squeeze(narrow) {
  panel.hidden = !narrow;
  document.documentElement.classList.toggle("lesson-open", narrow);
}

function close() {
  squeeze(false);
  open.focus();
}

// What another tab has written since stands here too, unless something was written here as well.
function keep() {
  clearTimeout(saving);
  saving = undefined;
  const mine = editor.text() === start ? null : editor.text();
  const theirs = kept.read();
  conflict.hidden = true;
  if (mine === theirs) known = theirs;
  else if (mine === known) take(theirs);
  else if (theirs !== known) conflict.hidden = false;
  else if (kept.write(mine)) known = mine;
  else say("This browser keeps nothing: download exercise.py before you leave.", true);
}

function take(theirs) {
  conflict.hidden = true;
  known = theirs;
  editor.set(theirs ?? start);
}

function overwrite() {
  known = kept.read();
  keep();
}

function onchange() {
  clearTimeout(saving);
  saving = setTimeout(keep, 300);
}
addEventListener("pagehide", () => saving && keep());
addEventListener("storage", ({ key }) => editor && (key === KEY || key === null) && keep());

function ask(asked) {
  question.hidden = !asked;
}

function reset() {
  ask(false);
  editor.set(start);
  overwrite();
  results.replaceChildren();
  say("The exercise is back to its original state.");
}

function download() {
  const link = element("a", { href: URL.createObjectURL(new Blob([editor.text()], { type: "text/x-python" })), download: "exercise.py" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  say(`Put it at tutorials/${name}/exercise.py in a clone; there, minipaged learn check ${number} goes on with it.`);
}

// ---- the engine --------------------------------------------------------------------------------------------

let task; // what the worker does: { id, done, alarm, test }
let last = 0;

const engine = new EngineWorker((message) => {
  if (message.id !== task?.id) return;
  if (message.test !== undefined) {
    task.test = message.test;
    setAlarm();
    say(message.test ? `${message.test} ...` : "Running the tests ...");
  } else finish(message);
}, { button: null, progress, say, lessons: true });

// Counts seconds, so that a page that stood still itself does not blame the worker.
function setAlarm(most = SECONDS) {
  let seconds = 0;
  clearInterval(task.alarm);
  task.alarm = setInterval(() => ++seconds >= most && end(`Not done after ${most} s; is there an endless loop?`), 1000);
}

function finish(message) {
  clearInterval(task.alarm);
  stop.hidden = true;
  const { done } = task;
  task = undefined;
  done(message);
}

// Ends what runs, with the worker: nothing else stops a loop.
function end(why) {
  if (!task) return;
  const { test } = task;
  engine.stop();
  finish({ ended: test ? `${test} ${why}` : why });
}

// Resolves to the answer of the worker: {report}, {run}, {error} or {ended}; null while something else runs.
async function call(request) {
  if (task) return null;
  keep();
  const id = ++last;
  const answer = new Promise((done) => (task = { id, done }));
  stop.hidden = false;
  const begin = () => {
    if (task?.id !== id) return; // stopped while it loaded
    say(request.call === "check" ? "Loading the tests ..." : "The engine runs ...");
    setAlarm(request.call === "run" ? SECONDS : LOADING);
    engine.send({ ...request, id, number, source: editor.text() });
  };
  engine.load().then(begin, () => task?.id === id && finish({}));
  const message = await answer;
  if (message.error || message.ended) say(message.error ?? message.ended, true);
  return message;
}

const line = (text, className = "") => element("p", { className, textContent: text });

function showReport({ green, tasks, elsewhere }) {
  results.replaceChildren(...tasks.map((each) =>
    element("div", { className: `lesson-task ${each.green ? "green" : "red"}` },
      line(`${each.green ? "✓" : "✗"} ${each.head}`, "lesson-head"),
      ...each.tests.map(([fact, ...lines]) => element("div", { className: "lesson-test" }, line(fact, "lesson-fact"), ...lines.map((text) => line(text)))))));
  const others = elsewhere ? ` ${counted(elsewhere, "test")} ${elsewhere === 1 ? "needs torch: it runs" : "need torch: they run"} with minipaged learn check ${number} in a clone.` : "";
  const todo = tasks.filter((each) => !each.green).length;
  say(green ? `Lesson ${number} is green. Now run the engine with it, and compare with the real module, linked in the lesson.${others}` : `${todo} of ${counted(tasks.length, "task")} ${todo === 1 ? "is" : "are"} red.${others}`);
}

async function check() {
  const message = await call({ call: "check" });
  if (message?.report) showReport(message.report);
  else if (message) results.replaceChildren();
  return message?.report ?? null;
}

async function run() {
  const message = await call({ call: "run", demo: Number(which.value || 0) });
  if (!message?.run) return null;
  if (!viewer) {
    const { mountViewer } = await import(place("../javascripts/viewer/viewer.js"));
    viewer = mountViewer(stage, { baseUrl: new URL("..", import.meta.url).href, label: "The engine with your classes" });
  }
  viewer.load(message.run.lines.join("\n"));
  say(`${message.run.note || "The engine runs with your classes."} ${demos[Number(which.value || 0)]}.`);
  stage.scrollIntoView({ block: "nearest" });
  return viewer.state();
}

open.addEventListener("click", show);
globalThis.lesson = { show, load: () => engine.load(), check, run, reset, text: () => editor.text(), set: (text) => editor.set(text) };
