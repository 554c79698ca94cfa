/** Point clouds, drawn on a canvas. */

import { scaleAt } from "./colors.js";
import { readPoints } from "./data.js";
import { el } from "./dom.js";

const TURN = 0.008;
/**
 * Shows a point cloud. Drag or use the arrow keys to turn it, the wheel to enlarge it.
 *
 * Nearer points cover points behind them. Without colours, points are coloured by height.
 */
export function pointCloud(id, file) {
  const canvas = el("canvas", {
    class: "cloud",
    tabIndex: 0,
    role: "img",
    "aria-label": "Point cloud: turn it with the mouse or the arrow keys",
  });
  const view = { yaw: 0.7, pitch: 0.45, zoom: 1 };
  /** @type {ReturnType<typeof prepared> | null} */
  let cloud = null;
  /** @type {[number, number] | null} The last place of the pressed pointer. */
  let held = null;
  let isPending = false;

  function redraw() {
    if (isPending) return;
    isPending = true;
    requestAnimationFrame(() => {
      isPending = false;
      drawCloud(canvas, cloud, view);
    });
  }

  function turn(across, down) {
    view.yaw += across;
    view.pitch = Math.max(-1.55, Math.min(1.55, view.pitch + down));
    redraw();
  }

  canvas.addEventListener("pointerdown", (event) => {
    held = [event.clientX, event.clientY];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    turn((event.clientX - held[0]) * TURN, (event.clientY - held[1]) * TURN);
    held = [event.clientX, event.clientY];
  });
  for (const end of ["pointerup", "pointercancel"])
    canvas.addEventListener(end, () => {
      held = null;
    });
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      view.zoom = Math.max(0.2, Math.min(20, view.zoom * Math.exp(-event.deltaY * 0.0015)));
      redraw();
    },
    { passive: false },
  );
  canvas.addEventListener("dblclick", () => {
    Object.assign(view, { yaw: 0.7, pitch: 0.45, zoom: 1 });
    redraw();
  });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, -0.1], ArrowDown: [0, 0.1] }[
      event.key
    ];
    if (by) {
      event.preventDefault();
      event.stopPropagation();
      turn(...by);
    }
  });
  new ResizeObserver(redraw).observe(canvas);
  const caption = el("figcaption", "Loading…");
  readPoints(id, file).then(
    (found) => {
      cloud = prepared(found);
      caption.textContent =
        found.total > found.x.length ? `${found.x.length} of ${found.total} points` : `${found.total} points`;
      canvas.dataset.points = String(found.x.length);
      redraw();
    },
    (error) => {
      caption.textContent = error.message;
    },
  );
  return el("figure", canvas, caption);
}

function prepared({ x, y, z, colors }) {
  const lists = [x, y, z];
  const bounds = lists.map((list) => [
    list.reduce((a, b) => (b !== null && b < a ? b : a), Infinity),
    list.reduce((a, b) => (b !== null && b > a ? b : a), -Infinity),
  ]);
  const size = Math.max(1e-12, ...bounds.map(([low, high]) => high - low));
  const places = lists.map((list, axis) =>
    Float32Array.from(list, (value) =>
      value === null ? NaN : (value - (bounds[axis][0] + bounds[axis][1]) / 2) / size,
    ),
  );
  const [low, high] = bounds[2];
  const shades = new Uint8Array(3 * x.length);
  for (let index = 0; index < x.length; index += 1) {
    const shade = colors
      ? [1, 3, 5].map((at) => parseInt(colors[index].slice(at, at + 2), 16))
      : scaleAt(high > low ? (z[index] - low) / (high - low) : 0.5);
    shades.set(shade, 3 * index);
  }
  return { places, shades };
}

function drawCloud(canvas, cloud, view) {
  const scale = Math.min(2, devicePixelRatio || 1);
  const width = Math.max(1, Math.round(canvas.clientWidth * scale)),
    height = Math.max(1, Math.round(canvas.clientHeight * scale));
  canvas.width = width;
  canvas.height = height;
  canvas.dataset.turn = `${view.yaw.toFixed(3)} ${view.pitch.toFixed(3)}`;
  if (!cloud) return;
  const [x, y, z] = cloud.places;
  const context = canvas.getContext("2d");
  const picture = context.createImageData(width, height);
  const depths = new Float32Array(width * height).fill(-Infinity);
  const [cosYaw, sinYaw, cosPitch, sinPitch] = [
    Math.cos(view.yaw),
    Math.sin(view.yaw),
    Math.cos(view.pitch),
    Math.sin(view.pitch),
  ];
  const reach = Math.min(width, height) * 0.78 * view.zoom;
  const dot = Math.max(1, Math.round(scale * (x.length > 20000 ? 1 : x.length > 3000 ? 2 : 3)));
  for (let index = 0; index < x.length; index += 1) {
    const across = x[index] * cosYaw - y[index] * sinYaw;
    const away = x[index] * sinYaw + y[index] * cosYaw;
    const up = z[index] * cosPitch - away * sinPitch;
    const near = -(away * cosPitch + z[index] * sinPitch);
    const left = Math.round(width / 2 + across * reach),
      top = Math.round(height / 2 - up * reach);
    const light = 0.72 + 0.28 * Math.max(-1, Math.min(1, near * 1.6));
    for (let row = top; row < top + dot; row += 1) {
      for (let column = left; column < left + dot; column += 1) {
        if (row < 0 || column < 0 || row >= height || column >= width) continue;
        const at = row * width + column;
        if (near <= depths[at]) continue;
        depths[at] = near;
        for (let channel = 0; channel < 3; channel += 1)
          picture.data[4 * at + channel] = cloud.shades[3 * index + channel] * light;
        picture.data[4 * at + 3] = 255;
      }
    }
  }
  context.putImageData(picture, 0, 0);
}
