/** Images with masks. Small images are enlarged, and each class of a mask has a switch. */

import { fileUrl } from "./data.js";
import { el, fill, shorten } from "./dom.js";
import { state } from "./state.js";

const SMALL = 64;

/** The colour of each class of a mask, as red, green and blue. */
export const CLASSES = classColors();

/** Returns the 256 colours that `destinations.media` computes too. */
function classColors() {
  return Array.from({ length: 256 }, (_, index) => {
    const hue = (index * 0.618033988749895) % 1;
    return index
      ? [0, 4, 2].map((sector) =>
          Math.round(255 * Math.max(0, Math.min(1, Math.abs(((hue + sector / 6) % 1) * 6 - 3) - 1))),
        )
      : [0, 0, 0];
  });
}

/**
 * Returns an image with its masks above it. A click calls `enlarge`. A small image is scaled up to `side`, with sharp
 * pixels; an infinite side fills the window.
 */
export function picture(id, item, side, enlarge) {
  const name = item.caption ? shorten(item.caption, 200) : `Image ${item.index ?? 0} of step ${item.step}`;
  const frame = el("button", { type: "button", class: "picture", title: "Enlarge", onclick: enlarge });
  const image = el("img", {
    alt: name,
    decoding: "async",
    src: fileUrl(id, item.file),
  });
  image.addEventListener(
    "load",
    () => {
      const { naturalWidth: wide, naturalHeight: high } = image;
      const least = Math.max(wide, high);
      const width = least < SMALL ? Math.round(wide * (side / least)) : Math.min(wide, 420);
      frame.style.width = Number.isFinite(side) ? `${width}px` : `min(100%, ${(76 * wide) / high}vh)`;
      frame.style.aspectRatio = `${wide} / ${high}`;
      frame.classList.toggle("pixelated", least < 2 * SMALL);
    },
    { once: true },
  );
  image.addEventListener(
    "error",
    () =>
      fill(
        frame,
        el(
          "span",
          { class: "muted", style: { "line-height": "1.4", padding: "10px", display: "block" } },
          "This image can't be read.",
        ),
      ),
    { once: true },
  );
  frame.append(image);
  for (const [mask, files] of Object.entries(item.masks ?? {})) frame.append(maskLayer(id, mask, files));
  return frame;
}

/** Returns a canvas with the colours of the classes that are switched on. */
function maskLayer(id, mask, { file, overlay }) {
  const canvas = el("canvas", { class: "mask", "aria-hidden": "true", "data-mask": mask });
  const source = el("img", { src: fileUrl(id, file) });
  /** @type {Uint8Array | null} */
  let classes = null;
  canvas.paint = () => {
    canvas.style.opacity = state.opacity;
    if (!classes) {
      const isOff = state.class.some((one) => one === mask || one.startsWith(`${mask}/`));
      canvas.style.visibility = isOff ? "hidden" : "visible";
      return;
    }
    const context = canvas.getContext("2d");
    const painted = context.createImageData(canvas.width, canvas.height);
    const isOn = (at) => at > 0 && !state.class.includes(mask) && !state.class.includes(`${mask}/${at}`);
    const shown = Array.from({ length: 256 }, (_, at) => isOn(at));
    classes.forEach((at, pixel) => {
      if (shown[at]) painted.data.set([...CLASSES[at], 255], 4 * pixel);
    });
    context.putImageData(painted, 0, 0);
  };
  source.addEventListener(
    "load",
    () => {
      canvas.width = source.naturalWidth;
      canvas.height = source.naturalHeight;
      const context = canvas.getContext("2d", { willReadFrequently: true });
      context.drawImage(source, 0, 0);
      try {
        const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
        const known = new Map(
          CLASSES.map(([red, green, blue], at) => [(red << 16) | (green << 8) | blue, at]),
        );
        classes = Uint8Array.from(
          { length: data.length / 4 },
          (_, pixel) =>
            known.get((data[4 * pixel] << 16) | (data[4 * pixel + 1] << 8) | data[4 * pixel + 2]) ?? 255,
        );
      } catch {
        // A page opened from a file may not read pixels: it shows the logged overlay as a whole.
        const whole = overlay ? el("img", { src: fileUrl(id, overlay), alt: "" }) : null;
        if (whole) whole.addEventListener("load", () => context.drawImage(whole, 0, 0), { once: true });
      }
      canvas.paint();
    },
    { once: true },
  );
  return canvas;
}
