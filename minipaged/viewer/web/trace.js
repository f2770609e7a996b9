// The page of one recorded run; its trace is in the page: gzip, in base64.

import { mountViewer } from "./viewer.js";
import { themeButton } from "./theme.js";

themeButton(document.getElementById("theme"));
globalThis.viewer = mountViewer(document.getElementById("viewer"));
const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
globalThis.viewer.load(text);
