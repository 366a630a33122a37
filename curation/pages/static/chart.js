// A line chart of [x, y] points.
import { html } from "/static/page.js";

const WIDTH = 640, HEIGHT = 250, LEFT = 40, RIGHT = 580, TOP = 14, BOTTOM = 220;

export function Chart({ points, title }) {
  const ys = points.map(([, y]) => y), [low, high] = [Math.min(...ys), Math.max(...ys)];
  const [[first], [last, end]] = [points[0], points.at(-1)];
  const step = stepOf(high - low), floor = step * Math.floor(low / step), top = step * Math.ceil(high / step) || step;
  const x = (value) => LEFT + ((value - first) / (last - first || 1)) * (RIGHT - LEFT);
  const y = (value) => BOTTOM - ((value - floor) / (top - floor || 1)) * (BOTTOM - TOP);
  const path = points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  const lines = Array.from({ length: Math.round((top - floor) / step) + 1 }, (_, index) => floor + index * step);
  return html`<svg class="chart" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-labelledby="chart-title chart-about">
    <title id="chart-title">${title}</title>
    <desc id="chart-about">From ${ys[0].toFixed(3)} in round ${first} to ${end.toFixed(3)} in round ${last}; minimum ${low.toFixed(3)}.</desc>
    ${lines.map((value) => html`<path class="rule" d="M${LEFT} ${y(value)}H${RIGHT}" /><text x=${LEFT - 8} y=${y(value) + 4} text-anchor="end">${+value.toFixed(3)}</text>`)}
    <polygon class="area" points="${LEFT},${BOTTOM} ${path} ${RIGHT},${BOTTOM}" />
    <polyline class="line" points=${path} />
    <circle class="dot" cx=${x(last)} cy=${y(end)} r="5" />
    <text class="end" x=${RIGHT + 10} y=${y(end) + 5}>${end.toFixed(3)}</text>
    <text x=${LEFT} y=${HEIGHT - 8}>round ${first}</text><text x=${RIGHT} y=${HEIGHT - 8} text-anchor="end">round ${last}</text>
  </svg>`;
}

// Returns the distance of grid lines: 1, 2, 5 or 10 times a power of ten, for at most six lines.
function stepOf(range) {
  const power = 10 ** Math.floor(Math.log10(range / 5 || 0.1));
  return power * [1, 2, 5, 10].find((times) => range / (times * power) <= 5);
}
