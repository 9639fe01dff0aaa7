"use strict";
// Parts of a page that tell of what changes ([data-live]) are asked for again: once a form has done
// something or a job that the page shows has ended, and on pages of the index (main[data-often])
// every few seconds. What somebody is about to fill in, tick or mark stays as it is until then.

const OFTEN = 10_000;
const SELDOM = 160_000;

// What was told of each part last: a page changes itself, so that its elements can't be compared.
const told = new Map();

function parts() {
  return [...document.querySelectorAll("[data-live]")];
}

function textOf(part) {
  return part.outerHTML
    .replace(/(<time[^>]*>)[^<]*/g, "$1")
    .replace(/<progress[^>]*>/g, "")
    .replace(/(<p class="message">)[^<]*/g, "$1");
}

function isChanged(field) {
  if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
  if (field.options) return field.selectedIndex !== Math.max(0, [...field.options].findIndex((one) => one.defaultSelected));
  return field.type !== "hidden" && field.value !== field.defaultValue;
}

function isInUse(part) {
  const focus = document.activeElement;
  const selection = getSelection();
  return (part.contains(focus) && focus.matches("input:not([type='checkbox']), select, textarea"))
    || part.querySelector(":scope details[open] form, .htmx-request, :active") !== null
    || [...part.querySelectorAll("input, select, textarea")].some(isChanged)
    || (!selection.isCollapsed && selection.containsNode(part, true));
}

// What has the focus, in the part that comes in its place; the part itself if it is not there.
function sameIn(next, focus) {
  const isSame = (one) => ["href", "name", "value"].every((name) => one.getAttribute(name) === focus.getAttribute(name))
    && one.textContent === focus.textContent;
  return [...next.querySelectorAll(focus.tagName)].find(isSame) ?? next;
}

function replace(part, next) {
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  const panned = [...part.querySelectorAll(".scroll, .timeline")].map((one) => one.scrollLeft);
  part.replaceWith(next);
  next.querySelectorAll(".scroll, .timeline").forEach((one, at) => { one.scrollLeft = panned[at] ?? 0; });
  htmx.process(next);
  if (focus) {
    const place = sameIn(next, focus);
    if (place === next) next.tabIndex = -1;
    place.focus({ preventScroll: true });
  }
}

let asked = new Date(document.documentElement.dataset.now);

// A page that can't be had says how old it is.
function tellAge(isOld) {
  const note = document.getElementById("old");
  if (isOld && note.hidden) note.querySelector("time").dateTime = asked.toISOString();
  if (isOld) note.querySelector("time").textContent = ago(asked.toISOString());
  note.hidden = !isOld;
}

// Asks for the page, and shows what it says otherwise now; whether it was had.
async function renew(from = null) {
  const address = location.href;
  if (parts().length === 0) return true;
  let page;
  try {
    const answer = await fetch(address, { headers: { "HX-Request": "true", Accept: "text/html" } });
    if (answer.redirected && !parts().some(isInUse)) location.reload(); // to sign in again
    if (!answer.ok || answer.redirected) throw new Error(answer.statusText);
    page = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    tellAge(true);
    return false;
  }
  tellAge(false);
  asked = new Date(Date.now() + ahead);
  if (location.href !== address) return true; // another page since
  let changed = false;
  for (const part of parts()) {
    const next = page.getElementById(part.id);
    if (next === null) {
      if (parts().some(isInUse)) continue;
      location.reload(); // it is a page of another kind now
      return true;
    }
    const text = textOf(next);
    if (text === told.get(part.id) || (isInUse(part) && !part.contains(from))) continue;
    told.set(part.id, text);
    replace(part, next);
    changed = true;
  }
  if (changed) document.dispatchEvent(new CustomEvent("cairn:renewed"));
  return true;
}

function often() {
  let wait = OFTEN;
  const next = () => setTimeout(async () => {
    if (!document.hidden) wait = (await renew()) ? OFTEN : Math.min(2 * wait, SELDOM);
    next();
  }, wait);
  next();
  document.addEventListener("visibilitychange", () => document.hidden || renew());
}

for (const part of parts()) told.set(part.id, textOf(part));
if (document.querySelector("main[data-often]")) often();

document.addEventListener("htmx:afterRequest", ({ detail }) => {
  const { successful, requestConfig, xhr } = detail;
  if (successful && requestConfig.verb === "post" && !xhr.getResponseHeader("HX-Redirect")) renew(detail.elt);
});
