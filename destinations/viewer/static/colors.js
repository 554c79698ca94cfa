/**
 * The colours of runs, bands and numbers.
 *
 * A run has the same colour on every page: its field's, or its own. The first runs have the colours of the palette, the
 * others are grey.
 */

import { isDark } from "./dom.js";
import { placed, slotsNow, tell } from "./state.js";

/** Colours that stay distinct with the common kinds of colour blindness, for light and dark backgrounds. */
const PALETTES = {
  light: "#2e69e1 #ec5f07 #a33993 #2a5417 #036476 #8e8f4b #1da080 #633283 #961f49 #717172".split(" "),
  dark: "#4884fc #ef661e #ee96dd #8bda6c #81e5fe #ebec83 #5fc0a2 #b189d0 #d2326a #c8c8c8".split(" "),
};
/** The number of colours. */
const MOST_COLORS = PALETTES.light.length;
/** A scale of rising lightness. */
const SCALES = {
  light: "#3116a1 #5f119f #880b8c #ab056b #c51945 #d43703 #d25e03 #d77500".split(" "),
  dark: "#5b59e0 #9758e0 #ca58cd #f55daa #fe8289 #ffa37c #ffc076 #ffdc4f".split(" "),
};

/** The best runs by the goal, in the order of the palette; a run keeps its place while it is among them. */
const best = { goal: "", slots: [] };
/** The colour of each run by the chosen field. */
const hues = new Map();

function ground() {
  return isDark() ? "dark" : "light";
}

/** Sets the order of the shown runs by the goal, the best first. Without a goal, colours follow the order of choice. */
export function setBest(goal, ids) {
  const first = ids.slice(0, MOST_COLORS);
  const kept = goal === best.goal ? best.slots.map((id) => (first.includes(id) ? id : "")) : [];
  const slots = placed(
    kept,
    first.filter((id) => !kept.includes(id)),
  );
  const isSame = goal === best.goal && String(slots) === String(best.slots);
  Object.assign(best, { goal, slots });
  if (!isSame) tell(new Set(["hues"]));
}

/** Returns the place of a run in the palette; places beyond it are grey. A run that stands alone has the first. */
export function slotOf(id) {
  const slot = (best.goal ? best.slots : slotsNow()).indexOf(id);
  if (slot >= 0) return slot;
  return slotsNow().includes(id) ? MOST_COLORS : 0;
}

/** Sets the colours of runs by a field; without any, each run has its own. */
export function setHues(found) {
  if (JSON.stringify([...found]) === JSON.stringify([...hues])) return;
  hues.clear();
  for (const [id, color] of found) hues.set(id, color);
  tell(new Set(["hues"]));
}

/** Returns the colour of a run. */
export function colorOf(id) {
  return hues.get(id) ?? colorOfSlot(slotOf(id));
}

/** Returns the colour of a band: of the first ones the field's if all of its runs share it, or else its number's. */
export function colorOfBand({ number, members }) {
  const found = new Set(members.map(({ run }) => hues.get(run)));
  return (found.size === 1 && number < MOST_COLORS && [...found][0]) || colorOfSlot(number);
}

/** Returns the colour of a slot; slots beyond the palette are grey. */
export function colorOfSlot(slot) {
  return PALETTES[ground()][slot] ?? contextColor();
}

/** Returns the grey of lines beyond the palette, which stay in the background. */
export function contextColor() {
  return isDark() ? "#4d5058" : "#b4b4ae";
}

/** Returns the grey of a run without a value. */
export function neutral() {
  return colorOfSlot(MOST_COLORS - 1);
}

/** Returns the colour of a share in [0, 1] as red, green and blue. */
export function scaleAt(share) {
  const stops = SCALES[ground()].map((stop) =>
    [1, 3, 5].map((at) => Number.parseInt(stop.slice(at, at + 2), 16)),
  );
  const at = Math.max(0, Math.min(0.9999, share || 0)) * (stops.length - 1);
  const [from, to] = [stops[Math.floor(at)], stops[Math.floor(at) + 1]];
  return from.map((one, channel) => Math.round(one + (to[channel] - one) * (at % 1)));
}

/** Returns the colour of a share in [0, 1]. */
export function shade(share) {
  return `#${scaleAt(share)
    .map((channel) => channel.toString(16).padStart(2, "0"))
    .join("")}`;
}

/** Returns a colour with some opacity. */
export function faded(color, opacity) {
  return (
    color +
    Math.round(opacity * 255)
      .toString(16)
      .padStart(2, "0")
  );
}
