"use strict";
// Follows operations that a page shows, from the event stream, to their end.

const ENDED = ["succeeded", "failed", "cancelled"];

// The stream of each card that is followed.
const streams = new Map();

function sizeText(bytes) {
  let value = bytes;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 999.95) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

function timeLeft(seconds) {
  if (seconds === null || seconds === undefined) return "";
  return seconds < 90 ? ` · ${Math.ceil(seconds)} s left` : ` · ${Math.round(seconds / 60)} min left`;
}

function show(place, operation) {
  const bar = place.querySelector("progress");
  const { done_bytes: done, total_bytes: total, message } = operation.progress;
  place.dataset.state = operation.state;
  const badge = place.querySelector(".state");
  badge.className = `state ${operation.state}`;
  badge.textContent = operation.state;
  if (total) {
    bar.max = total;
    bar.value = done;
  }
  const text = total ? `${sizeText(done)} of ${sizeText(total)}${timeLeft(operation.progress.seconds_left)}` : message;
  place.querySelector(".message").textContent = text || "waiting for a worker";
}

// The end is drawn by the server, as after a reload: with files, a reason, or a way to go on.
async function redraw(place) {
  const answer = await fetch(`/operations/${encodeURIComponent(place.dataset.operation)}/card`, { headers: { "HX-Request": "true" } });
  if (!answer.ok) return;
  const next = document.createElement("template");
  next.innerHTML = await answer.text();
  const card = next.content.firstElementChild;
  const within = place.contains(document.activeElement);
  place.replaceWith(card);
  htmx.process(card);
  if (within) {
    card.tabIndex = -1;
    card.focus({ preventScroll: true });
  }
  announce(`${card.dataset.name}: ${card.dataset.state}`);
  renew(); // what it has changed is told elsewhere on the page
}

function follow(place) {
  if (place.dataset.followed || ENDED.includes(place.dataset.state)) return;
  place.dataset.followed = "yes";
  const source = new EventSource(`/v1/operations/${encodeURIComponent(place.dataset.operation)}/events`);
  streams.set(place, source);
  source.onmessage = (event) => {
    const operation = JSON.parse(event.data);
    if (!place.isConnected) {
      leave(place);
    } else if (ENDED.includes(operation.state)) {
      leave(place);
      redraw(place);
    } else {
      show(place, operation);
    }
  };
}

function leave(place) {
  streams.get(place).close();
  streams.delete(place);
}

function followAll(within) {
  within.querySelectorAll("[data-operation]").forEach(follow);
}

document.addEventListener("DOMContentLoaded", () => followAll(document));
document.addEventListener("htmx:afterSwap", () => followAll(document));
document.addEventListener("cairn:renewed", () => {
  [...streams.keys()].filter((place) => !place.isConnected).forEach(leave);
  followAll(document);
});
