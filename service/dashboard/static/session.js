"use strict";
// What a page says with each change that it asks for, and how a browser signs out.

function csrfHeaders() {
  const found = document.querySelector("meta[name='csrf-token']");
  return found ? { "X-CSRF-Token": found.content } : {};
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-sign-out]");
  if (button) {
    button.disabled = true;
    const answer = await fetch("/sign-out", { method: "POST", headers: csrfHeaders() });
    const { next } = answer.ok ? await answer.json() : { next: "/sign-in" };
    location.assign(next);
  }
});
