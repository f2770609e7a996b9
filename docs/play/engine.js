// What the pages share: the worker, the button that loads it with its progress, small helpers for the DOM.

export const at = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const counted = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;

export function tell(text, failed = false) {
  at("status").textContent = text;
  at("status").dataset.state = failed ? "failed" : "";
  if (failed) at("status").scrollIntoView({ block: "nearest" });
}

export class EngineWorker {
  // onmessage gets every message but those about loading. `lessons`: with their tests; `model`: with the pocket
  // model. The button, if there is one, loads, and goes away when that is done.
  constructor(onmessage, { button = at("load"), progress = at("progress"), say = tell, lessons = false, model = false } = {}) {
    Object.assign(this, { onmessage, button, progress, say, lessons, model });
    button?.addEventListener("click", () => this.load().catch(() => {}));
  }

  // Resolves once the engine is ready; a second call waits for the first.
  load() {
    return (this.loading ??= new Promise((done, failed) => {
      const focused = this.button && document.activeElement === this.button;
      if (this.button) this.button.disabled = true;
      this.progress.hidden = false;
      this.say("Loading the engine ...");
      this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
      const fail = (text) => {
        this.say(text, true);
        if (this.button) this.button.disabled = false;
        if (focused && document.activeElement === document.body) this.button.focus(); // a disabled button loses it
        this.stop();
        failed(new Error(text));
      };
      this.worker.onerror = (event) => fail(event.message ?? "The engine cannot be loaded; check the connection and try again.");
      this.worker.onmessage = ({ data }) => {
        if (data.total) Object.assign(this.progress, { max: data.total, value: data.loaded });
        else if (data.ready) {
          if (this.button) this.button.parentElement.hidden = true;
          this.progress.hidden = true;
          this.ready = true;
          this.say("Loaded.");
          done();
        } else if (data.error && !this.ready) fail(data.error);
        else {
          if (data.dead) this.stop();
          this.onmessage(data);
        }
      };
      this.worker.postMessage({ call: "load", lessons: this.lessons, model: this.model });
    }));
  }

  async send(message) {
    await this.load();
    this.worker.postMessage(message);
  }

  // Ends the worker, whatever it does; the next call loads another.
  stop() {
    this.worker?.terminate();
    this.progress.hidden = true;
    this.loading = undefined;
    this.ready = false;
  }
}
