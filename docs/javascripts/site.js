// Rows of frames (docs/_generate/moving.py) become one frame with buttons; arrow keys work, too.
// Starts moving by itself only if asked to, and never where the reader prefers stillness.
// Besides, what the theme leaves out for keyboards and screen readers: a name for the search dialog, focus for
// what scrolls sideways, and no landmark for every copy button and every heading with sections of its own.
// To the search, a hyphen before a word means "without it"; an option is therefore asked for without its hyphens.
// And what style sheets cannot say: short code and options are not broken at their hyphens, long paths in tables
// and in headings are broken after a slash, wide charts scroll.

for (const search of document.querySelectorAll(".md-search")) search.setAttribute("aria-label", "Search");
const typed = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
for (const field of document.querySelectorAll(".md-search__input"))
  Object.defineProperty(field, "value", { ...typed, get: () => typed.get.call(field).replace(/(^|\s)--+(?=\w)/g, "$1") });
for (const code of document.querySelectorAll("code"))
  if (code.textContent.length < 28 && !code.closest("pre, td, th, h1, h2, h3")) code.classList.add("short");

const texts = (element) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  return found;
};
const whole = (option) => Object.assign(document.createElement("span"), { className: "option", textContent: option });
for (const code of document.querySelectorAll(".language-bash code, :not(pre) > code"))
  for (const text of texts(code)) {
    const parts = text.data.split(/(--[a-z][\w-]+)/);
    if (parts.length > 1) text.replaceWith(...parts.map((part, i) => (i % 2 ? whole(part) : part)));
  }
for (const code of document.querySelectorAll("td code, h2 code, h3 code"))
  if (code.textContent.length > 34 || !code.closest("td"))
    for (const text of texts(code)) {
      const parts = text.data.split(/(?<=\/)/);
      text.replaceWith(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
    }

const unlandmark = () => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role]), .md-nav--secondary nav:not([role])")) {
    nav.setAttribute("role", "none");
    nav.removeAttribute("aria-label");
  }
};
unlandmark();
new MutationObserver(unlandmark).observe(document.body, { childList: true, subtree: true });

const reach = () => {
  for (const code of document.querySelectorAll("pre > code")) if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
};
// Later than the theme, which takes the focus away again where there is no mouse.
new ResizeObserver(() => setTimeout(reach)).observe(document.querySelector(".md-content") ?? document.body);
addEventListener("load", () => {
  reach();
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) wrap.tabIndex = 0;
  for (const image of document.querySelectorAll(".md-typeset p > img, .sheet > img")) {
    const sheet = image.parentElement;
    sheet.classList.add("sheet");
    sheet.classList.toggle("wide", image.naturalWidth > 500);
    sheet.tabIndex = 0;
    sheet.setAttribute("role", "group");
    sheet.setAttribute("aria-label", image.alt);
  }
});

for (const box of document.querySelectorAll(".frames")) {
  const frames = [...box.querySelectorAll(".frame")];
  if (frames.length < 2) continue;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const bar = document.createElement("div");
  bar.className = "frames-bar";
  let at = Number(box.dataset.start || 0);
  let timer = 0;

  const show = (number) => {
    at = (number + frames.length) % frames.length;
    frames.forEach((frame, i) => (frame.hidden = i !== at));
    previous.disabled = at === 0;
    next.disabled = at === frames.length - 1;
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "Play";
  };
  const start = () => {
    play.textContent = "Pause";
    timer = setInterval(() => show(at + 1), 3500);
  };
  const button = (text, action) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.className = "md-button";
    made.addEventListener("click", action);
    bar.append(made);
    return made;
  };
  const step = (by) => {
    stop();
    const target = at + by;
    if (target >= 0 && target < frames.length) show(target);
  };
  const previous = button("Back", () => step(-1));
  const play = button("Play", () => (timer ? stop() : start()));
  const next = button("Next", () => step(1));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by && event.target.tagName === "BUTTON") {
      event.preventDefault();
      step(by);
    }
  });
  // All frames as high as the highest, so that the page does not jump.
  box.classList.add("moving");
  box.append(bar);
  const fit = () => {
    frames.forEach((frame) => ((frame.hidden = false), (frame.style.minHeight = "")));
    const height = Math.max(...frames.map((frame) => frame.offsetHeight));
    frames.forEach((frame) => (frame.style.minHeight = `${height}px`));
    show(at);
  };
  fit();
  addEventListener("resize", fit);
  if (box.dataset.plays && !still.matches) start();
}

// Scenes (docs/_generate/viewer_scenes.py): a picture becomes the viewer, with its trace, when it comes into sight.
const home = new URL("..", document.currentScript.src);
const scenes = document.querySelectorAll(".scene[data-scene]");
const showScene = async (figure) => {
  const [{ mountViewer }, answer] = await Promise.all([
    import(new URL("javascripts/viewer/viewer.js", home)),
    fetch(new URL(`scenes/${figure.dataset.scene}.jsonl`, home)),
  ]);
  if (!answer.ok) return;
  const text = await answer.text();
  figure.viewer = mountViewer(figure.querySelector(".scene-stage"), { baseUrl: home.href, label: figure.getAttribute("aria-label") });
  figure.viewer.load(text);
  figure.viewer.seek(Number(figure.dataset.start));
};
const inSight = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries)
      if (isIntersecting) {
        inSight.unobserve(target);
        showScene(target);
      }
  },
  { rootMargin: "400px" },
);
for (const figure of scenes) inSight.observe(figure);
