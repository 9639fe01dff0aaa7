"use strict";
// Offers names of fields, metrics and labels below a box in which a filter or columns are typed.

const WAIT = 120;

function complete(box) {
  const list = document.createElement("ul");
  list.id = `${box.name}-completions`;
  list.className = "completions";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Completions");
  list.hidden = true;
  box.parentElement.append(list);
  box.setAttribute("role", "combobox");
  box.setAttribute("aria-autocomplete", "list");
  box.setAttribute("aria-controls", list.id);
  box.setAttribute("aria-expanded", "false");

  let start = 0;
  let active = -1;
  let timer = 0;
  let latest = 0;

  function close() {
    clearTimeout(timer);
    latest += 1;
    list.hidden = true;
    list.replaceChildren();
    active = -1;
    box.setAttribute("aria-expanded", "false");
    box.removeAttribute("aria-activedescendant");
  }

  function mark(at) {
    const options = [...list.children];
    active = (at + options.length) % options.length;
    options.forEach((option, number) => option.setAttribute("aria-selected", String(number === active)));
    box.setAttribute("aria-activedescendant", options[active].id);
    options[active].scrollIntoView({ block: "nearest" });
  }

  function take(option) {
    const end = box.selectionStart;
    box.setRangeText(option.textContent, start, end, "end");
    close();
    box.focus();
  }

  function show(options) {
    list.replaceChildren(...options.map((text, number) => {
      const option = document.createElement("li");
      option.id = `${list.id}-${number}`;
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", "false");
      option.textContent = text;
      option.addEventListener("pointerdown", (event) => { event.preventDefault(); take(option); });
      return option;
    }));
    list.hidden = options.length === 0;
    box.setAttribute("aria-expanded", String(!list.hidden));
    active = -1;
  }

  async function ask() {
    const number = (latest += 1);
    const text = box.value.slice(0, box.selectionStart);
    const address = new URL(box.dataset.completions, location.href);
    address.searchParams.set("q", text);
    const answer = await fetch(address);
    if (!answer.ok || number !== latest || document.activeElement !== box) return;
    const { start: from, options } = await answer.json();
    if (number !== latest) return;
    start = from;
    show(options.filter((option) => option !== text.slice(from)));
  }

  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT);
  });
  box.addEventListener("blur", close);
  box.addEventListener("keydown", (event) => {
    if (list.hidden) {
      if (event.key === "ArrowDown") {
        event.preventDefault();
        ask();
      }
      return;
    }
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      mark(event.key === "ArrowDown" ? active + 1 : Math.max(active, 0) - 1);
    } else if ((event.key === "Enter" || event.key === "Tab") && active >= 0) {
      event.preventDefault();
      take(list.children[active]);
    } else if (event.key === "Escape") {
      event.preventDefault();
      close();
    } else if (event.key === "Enter") {
      close();
    }
  });
}

for (const box of document.querySelectorAll("input[data-completions]")) complete(box);
