// Small helpers: elements, icons, text table, frames.

const SVG = 'http://www.w3.org/2000/svg';

const ICONS = {
  back: 'M11 3 5 8l6 5z',
  forward: 'M5 3l6 5-6 5z',
  play: 'M4 2.5 13 8l-9 5.5z',
  pause: 'M4 3h3v10H4zM9 3h3v10H9z',
  reset: 'M8 3a5 5 0 1 0 4.9 6h-1.6A3.5 3.5 0 1 1 8 4.5c.9 0 1.7.3 2.3.9L8.5 7H13V2.5l-1.6 1.6A5 5 0 0 0 8 3z',
  theme: 'M8 1.5a6.5 6.5 0 1 0 0 13zM8 .5a7.5 7.5 0 1 1 0 15 7.5 7.5 0 0 1 0-15z',
  export: 'M7.2 2h1.6v6.2l2.3-2.3 1.1 1.1L8 11.2 3.8 7l1.1-1.1 2.3 2.3zM2.5 12.5h11V14h-11z',
  projector: 'M1.5 3h13v8h-13zM3 4.5v5h10v-5zM5 12.5h6V14H5z',
  help: 'M7.2 11.2h1.7v1.7H7.2zM8 3c1.8 0 3 1 3 2.6 0 1.3-.8 1.9-1.5 2.4-.5.4-.7.6-.7 1.2v.6H7.3v-.9c0-1.1.7-1.6 1.3-2 .5-.4.8-.6.8-1.2S8.9 4.5 8 4.5 6.6 5 6.6 5.9H5C5 4.1 6.2 3 8 3z',
  locked: 'M5 7V5a3 3 0 0 1 6 0v2h1v7H4V7zm1.5 0h3V5a1.5 1.5 0 0 0-3 0z',
  unlocked: 'M5 7V4a3 3 0 0 1 5.9-.8l-1.4.4A1.5 1.5 0 0 0 6.5 4v3H12v7H4V7z',
};

// An element with attributes (`on…` are listeners) and children; strings become text nodes, never markup.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A menu in a <details> closes on Escape and on a press beside it; returns what closes it.
export function closesBySelf(menu, opener) {
  const close = () => { menu.open = false; };
  document.addEventListener('pointerdown', (event) => { if (!menu.contains(event.target)) close(); });
  menu.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || !menu.open) return;
    event.stopPropagation();
    close();
    opener.focus();
  });
  return close;
}

function drawing(d, classes) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', '0 0 16 16');
  svg.setAttribute('class', classes);
  svg.setAttribute('aria-hidden', 'true');
  const path = document.createElementNS(SVG, 'path');
  path.setAttribute('d', d);
  svg.append(path);
  return svg;
}

export const icon = (name) => drawing(ICONS[name], 'mv-icon');

const SYMBOLS = {
  root: 'M2 2h12v12H2z',
  accepted: 'M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13z',
  shorter: 'M8 1.5 14.5 8 8 14.5 1.5 8z',
  behind: 'M8 2 14 8l-6 6-6-6z',
  rejected: 'M3 3l10 10M13 3 3 13',
  unverified: 'M8 3a5 5 0 1 0 0 10A5 5 0 0 0 8 3z',
  unseen: 'M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6z',
  next: 'M2.5 2.5h11v11h-11z',
  cut: 'M5 2.8h6L14 8l-3 5.2H5L2 8z',
};

// The verdict's mark as the tree draws it; colour and fill come from the style sheet.
export function symbol(verdict) {
  return drawing(SYMBOLS[verdict] ?? SYMBOLS.unverified, `mv-symbol mv-is-${verdict}`);
}

const SLOT = /\{(\w+)(?:\|([^|{}]*)\|([^|{}]*))?\}/g;

// Text by key: {name} is the value, {n|token|tokens} the form its number takes, as in Python's Texts.
// An unknown key shows itself, so that a gap is seen.
export function translator(texts) {
  return (key, values = {}) => (texts[key] ?? key).replace(SLOT, (whole, name, one, many) => {
    if (!(name in values)) return whole;
    if (one !== undefined) return values[name] === 1 ? one : many;
    return Number.isInteger(values[name]) ? values[name].toLocaleString('en') : String(values[name]);
  });
}

// The next frame; a hidden tab has none, so a timer stands in.
export function frame() {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, 120);
    requestAnimationFrame(() => {
      clearTimeout(timer);
      resolve();
    });
  });
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Milliseconds as the page writes them: whole from 10 up.
export function milliseconds(ms) {
  return ms >= 10 ? ms.toFixed(0) : ms.toFixed(1);
}

// Replace the children of `parent` by `list.map(make)`, keeping those whose key did not change at the front.
export function replaceTail(parent, keys, make) {
  const old = parent.mvKeys ?? [];
  let same = 0;
  while (same < keys.length && same < old.length && keys[same] === old[same]) same += 1;
  while (parent.children.length > same) parent.lastElementChild.remove();
  for (let index = same; index < keys.length; index += 1) parent.append(make(index));
  parent.mvKeys = keys;
  return same;
}
