"use strict";
// Small things that pages do by themselves: copying, a key for the search, what was chosen last.

function announce(text) {
  const place = document.getElementById("announcer");
  place.textContent = text;
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => { place.textContent = ""; }, 2500);
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    announce("Copied");
  } catch {
    // Without https, browsers lend the clipboard to nobody: the text is marked for a key to copy.
    const range = document.createRange();
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    announce("Selected: press Ctrl+C");
  }
}

// As the server says it, by its clock: an open page goes on to tell how long ago something was.
const ahead = Date.parse(document.documentElement.dataset.now) - Date.now();

function ago(moment) {
  const seconds = (Date.now() + ahead - Date.parse(moment)) / 1000;
  const length = Math.abs(seconds);
  if (length < 1) return "just now";
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([one]) => length >= one);
  const value = length / unit;
  const text = `${value >= 10 ? Math.round(value) : Number(value.toPrecision(2))} ${name}`;
  return seconds > 0 ? `${text} ago` : `in ${text}`;
}

setInterval(() => {
  for (const time of document.querySelectorAll("time[datetime]:not(.utc)")) time.textContent = ago(time.dateTime);
}, 10_000);

// A time says what it is in UTC, as in logs, and on the clock of who points at it.
document.addEventListener("mouseover", (event) => {
  const time = event.target.closest?.("time[datetime]");
  if (!time) return;
  const moment = new Date(time.dateTime);
  const utc = `${moment.toISOString().slice(0, 19).replace("T", " ")} UTC`;
  time.title = `${utc}\n${moment.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" })}`;
});

// Whoever moves the alias that others serve from is asked first.
const ASKED_FOR = "production";

document.addEventListener("htmx:confirm", (event) => {
  const form = event.target.closest?.("form[data-promote]");
  if (!form || form.elements.alias.value.trim() !== ASKED_FOR) return;
  const seen = form.querySelector(`[name="seen"][value^="${ASKED_FOR}="]`);
  const step = form.dataset.promote;
  if (!seen || seen.dataset.step === step) return;
  event.preventDefault();
  if (confirm(`Move ${ASKED_FOR} from step ${seen.dataset.step} to step ${step}?`)) event.detail.issueRequest(true);
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) copy(button);
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const wanted = document.querySelector(`[data-shortcut="${CSS.escape(event.key)}"]`);
  if (wanted) {
    event.preventDefault();
    wanted.focus();
    wanted.select();
  }
});

// The button says how many of the rows beside it are ticked, also those that a browser ticks again on a way back.
function countTicked(form) {
  const place = form?.querySelector("[data-ticked]");
  if (!place) return;
  const ticked = form.querySelectorAll(".pick input:checked").length;
  place.textContent = ticked ? ` (${ticked})` : "";
}

document.addEventListener("change", (event) => countTicked(event.target.form));
addEventListener("pageshow", () => document.querySelectorAll("form").forEach(countTicked));

// Text that was typed before the scripts were loaded is searched for as soon as they are.
document.addEventListener("DOMContentLoaded", () => {
  for (const field of document.querySelectorAll("input.typed")) {
    if (field.value !== field.defaultValue) field.dispatchEvent(new Event("input", { bubbles: true }));
  }
});

// Of a form that shows a part of a page, an error stands in that part, whose place stays.
document.addEventListener("htmx:beforeSwap", (event) => {
  const { detail } = event;
  if (detail.xhr.status >= 400 && detail.requestConfig.elt.hasAttribute("hx-select")) {
    detail.selectOverride = "unset";
    detail.swapOverride = "innerHTML";
  }
});

// What answers a form is read out, and seen.
document.addEventListener("htmx:afterSwap", (event) => {
  const told = event.detail.target.querySelector("[role='alert'], [data-focus]");
  if (told) {
    told.tabIndex = -1;
    told.focus({ preventScroll: false });
  }
});

// A button that htmx does not know yet does nothing: cairn.css lets nobody press it until then.
document.addEventListener("htmx:load", () => { document.documentElement.dataset.ready = ""; }, { once: true });

document.addEventListener("htmx:sendError", () => announce("No response from the server. Try again."));

// A file may be chosen in place of its text; nothing is sent before the form is.
for (const chooser of document.querySelectorAll("input[data-fills]")) {
  chooser.closest("label").hidden = false;
  chooser.addEventListener("change", async () => {
    const field = document.getElementById(chooser.dataset.fills);
    if (chooser.files.length) field.value = await chooser.files[0].text();
  });
}
