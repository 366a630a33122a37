// How each kind of task is asked and answered: choices with their keys, answers in words.

const BOTH = ["a tie", "both bad"];
const KEYS = "1234567890abcdef"; // of as many options as a project may have
const numbered = (texts, first = 0) => texts.map((text, index) => ({ text, key: KEYS[index], value: index + first }));

// Which item of a pair stands left: a bit of the assignment, so that no side is liked better.
export const leftOf = (task) => parseInt(task.assignment.at(-1), 16) & 1;

export const ASKS = {
  label: (task) => (task.many ? "Choose all that fit" : "Choose one"),
  rating: () => "Rate it",
  pair: () => "Which is better?",
  ranking: () => "Put the best first: choose one after the other, or move them",
};

// Several are collected, then sent; one choice is an answer by itself.
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
  return answer.map((value) => texts[value]).join(task.kind === "ranking" ? " > " : ", ") || "none of them";
}

// As this annotator sees them: by side.
function pairWords(task) {
  const sides = leftOf(task) ? ["B", "A"] : ["A", "B"];
  return [`${sides[0]} is better`, `${sides[1]} is better`, ...BOTH];
}
