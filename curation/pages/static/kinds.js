// Question, choices with their keys, and answers in words, for each kind of task.

const BOTH = ["a tie", "both bad"];
const KEYS = "1234567890abcdef"; // as many as a project may have options
const numbered = (texts, first = 0) => texts.map((text, index) => ({ text, key: KEYS[index], value: index + first }));

// Returns the item of a pair that is shown on the left. A bit of the assignment decides it, so that neither item has a better side.
export const leftOf = (task) => parseInt(task.assignment.at(-1), 16) & 1;

export const ASKS = {
  label: (task) => (task.many ? "Choose all that apply" : "Choose one"),
  rating: () => "Choose a rating",
  pair: () => "Which is better?",
  ranking: () => "Rank the items, best first: choose them in order, or move them",
};

// Whether choices are collected and then sent. Otherwise a single choice is the answer.
export const isCollected = (task) => task.kind === "ranking" || task.many;

export function choices(task) {
  const left = leftOf(task);
  return {
    label: () => numbered(task.options),
    rating: () => numbered(task.options, 1),
    ranking: () => numbered(task.items),
    pair: () => [
      { text: "A is better", key: "ArrowLeft", also: "1", value: left },
      { text: "A tie", key: "t", value: 2 },
      { text: "Both bad", key: "x", value: 3 },
      { text: "B is better", key: "ArrowRight", also: "2", value: 1 - left },
    ],
  }[task.kind]();
}

export const isComplete = (task, chosen) => task.kind !== "ranking" || chosen.length === task.items.length;
export const answerOf = (task, chosen) => (task.kind === "label" ? [...chosen].sort((a, b) => a - b) : [...chosen]);

export function inWords(task, answer) {
  const texts = { label: task.options, rating: ["", ...task.options], ranking: task.items, pair: pairWords(task) }[task.kind];
  return answer.map((value) => texts[value]).join(task.kind === "ranking" ? " > " : ", ") || "none";
}

// Answers to a pair in words, with A for the item on the left.
function pairWords(task) {
  const sides = leftOf(task) ? ["B", "A"] : ["A", "B"];
  return [`${sides[0]} is better`, `${sides[1]} is better`, ...BOTH];
}
