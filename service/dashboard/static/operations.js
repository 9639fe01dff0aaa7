"use strict";
// Starts an export where a button asks for it and shows its progress from the event stream.

function sizeText(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function timeLeft(seconds) {
  if (seconds === null || seconds === undefined) return "";
  return seconds < 90 ? `, ${Math.ceil(seconds)} s left` : `, ${Math.round(seconds / 60)} min left`;
}

function show(place, operation) {
  const bar = place.querySelector("progress");
  const message = place.querySelector(".message");
  const { done_bytes: done, total_bytes: total } = operation.progress;
  place.hidden = false;
  place.dataset.state = operation.state;
  if (total) {
    bar.max = total;
    bar.value = done;
  }
  if (operation.state === "succeeded") {
    bar.value = bar.max;
    const link = document.createElement("a");
    link.href = `/v1/artifacts/${encodeURIComponent(operation.result.artifact_id)}`;
    link.textContent = "files";
    message.replaceChildren("succeeded: ", link);
  } else if (operation.state === "failed" || operation.state === "cancelled") {
    place.classList.add("failed");
    message.textContent = operation.error ? `${operation.state}: ${operation.error.detail}` : operation.state;
  } else {
    message.textContent = total ? `${operation.state} ${sizeText(done)} of ${sizeText(total)}${timeLeft(operation.progress.seconds_left)}` : operation.state;
  }
  return ["succeeded", "failed", "cancelled"].includes(operation.state);
}

function follow(place, id, finished) {
  const source = new EventSource(`/v1/operations/${encodeURIComponent(id)}/events`);
  source.onmessage = (event) => {
    if (show(place, JSON.parse(event.data))) {
      source.close();
      finished();
    }
  };
}

async function convert(button) {
  const place = button.parentElement.querySelector(".operation");
  button.disabled = true;
  place.classList.remove("failed");
  const answer = await fetch(button.dataset.convert, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...csrfHeaders() },
    body: JSON.stringify({ format: "huggingface" }),
  });
  const body = await answer.json();
  if (!answer.ok) {
    show(place, { state: "failed", progress: {}, error: body });
    button.disabled = false;
    return;
  }
  show(place, body);
  follow(place, body.id, () => { button.disabled = false; });
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-convert]");
  if (button) {
    convert(button).catch((error) => {
      const place = button.parentElement.querySelector(".operation");
      show(place, { state: "failed", progress: {}, error: { detail: String(error) } });
      button.disabled = false;
    });
  }
});
