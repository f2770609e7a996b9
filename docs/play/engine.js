// What both pages share: the worker, the button that loads it with its progress, small helpers for the DOM.

export const at = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function tell(text, failed = false) {
  at("status").textContent = text;
  at("status").dataset.state = failed ? "failed" : "";
}

export class EngineWorker {
  // onmessage gets every message but those about loading.
  constructor(onmessage) {
    this.onmessage = onmessage;
    at("load").addEventListener("click", () => this.load().catch(() => {}));
  }

  // Resolves once the engine is ready; a second call waits for the first.
  load() {
    return (this.loading ??= new Promise((done, failed) => {
      at("load").disabled = true;
      at("progress").hidden = false;
      tell("Loading the engine ...");
      this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
      const fail = (text) => {
        tell(text, true);
        at("progress").hidden = true;
        at("load").disabled = false;
        this.worker.terminate();
        this.loading = undefined;
        failed(new Error(text));
      };
      this.worker.onerror = (event) => fail(event.message ?? "The worker cannot be started.");
      this.worker.onmessage = ({ data }) => {
        if (data.total) Object.assign(at("progress"), { max: data.total, value: data.loaded });
        else if (data.ready) {
          at("load").parentElement.hidden = true;
          this.ready = true;
          done();
        } else if (data.error && !this.ready) fail(data.error);
        else this.onmessage(data);
      };
      this.worker.postMessage({ call: "load" });
    }));
  }

  async send(message) {
    await this.load();
    this.worker.postMessage(message);
  }
}
