// The list of a ranking, best item first. Items are chosen in order, dragged by their handle, or moved by buttons.
import { html } from "/static/page.js";

// Returns the items in the order shown: placed ones first.
export const shownOrder = (task, placed) => [...placed, ...task.items.map((_, item) => item).filter((item) => !placed.includes(item))];

export function moved(order, item, to) {
  const others = order.filter((other) => other !== item);
  return [...others.slice(0, to), item, ...others.slice(to)];
}

// Moves the item with the pointer until its release. The item's position is the number of other items above the pointer.
function drag(event, item, move) {
  event.preventDefault();
  const rows = [...event.target.closest("ol").children], over = new AbortController(), { signal } = over;
  const isAbove = (row, y) => { const { top, bottom } = row.getBoundingClientRect(); return (top + bottom) / 2 < y; };
  addEventListener("pointermove", ({ clientY }) => move(item, rows.filter((row) => row.dataset.item !== String(item) && isAbove(row, clientY)).length), { signal });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => over.abort(), { signal });
}

// `actions` choose the items, and `move(item, to)` moves an item to a position.
export function Ranking({ task, placed, actions, move, Button }) {
  const order = shownOrder(task, placed);
  return html`<ol class="plain ranking">${order.map((item, place) => html`
    <li key=${item} data-item=${item}>
      <span class="handle" aria-hidden="true" onPointerDown=${(event) => drag(event, item, move)}>⠿</span>
      <${Button} action=${actions[item]} />
      ${[["up", "↑", place - 1], ["down", "↓", place + 1]].map(([way, arrow, to]) => html`
        <button type="button" class="move" aria-label=${`Move ${way}: ${task.items[item]}`} onClick=${() => move(item, to)}>${arrow}</button>`)}
    </li>`)}</ol>`;
}
