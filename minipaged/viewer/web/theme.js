// Light or dark: the system's choice until the reader has made one.

export function themeButton(button) {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let stored = null;
  try {
    stored = localStorage.getItem("mpv-theme");
  } catch {
    // Without storage the choice lasts as long as the page.
  }
  if (stored === "light" || stored === "dark") root.dataset.mpvTheme = stored;
  const isDark = () => (root.dataset.mpvTheme ?? (system.matches ? "dark" : "light")) === "dark";
  const tell = () => (button.textContent = isDark() ? "Light colours" : "Dark colours");
  button.addEventListener("click", () => {
    root.dataset.mpvTheme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("mpv-theme", root.dataset.mpvTheme);
    } catch {
      // As above.
    }
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}
