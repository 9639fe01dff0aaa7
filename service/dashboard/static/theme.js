"use strict";
// The theme that was chosen in this browser. It runs before the page is drawn, so that nothing flashes.

function storedTheme() {
  try {
    return localStorage.getItem("theme") ?? "system";
  } catch {
    return "system"; // the browser stores nothing
  }
}

function applyTheme(theme) {
  const { dataset } = document.documentElement;
  if (theme === "light" || theme === "dark") dataset.theme = theme;
  else delete dataset.theme;
}

function storeTheme(theme) {
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // It is that of this page alone.
  }
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

applyTheme(storedTheme());

document.addEventListener("DOMContentLoaded", () => {
  const choice = document.querySelector("[data-theme-choice]");
  choice.closest("label").hidden = false;
  choice.value = storedTheme();
  choice.addEventListener("change", () => {
    applyTheme(choice.value);
    storeTheme(choice.value);
    document.dispatchEvent(new CustomEvent("cairn:theme"));
    document.dispatchEvent(new CustomEvent("cairn:renewed")); // curves are drawn in its colours
  });
});
addEventListener("storage", (event) => {
  if (event.key === "theme") applyTheme(storedTheme());
});
