// What the mouse is over, in words. Lines are made when they are asked for, and text of the model stays text.

import { h } from './dom.js';

const AWAY = 14;

export class Tooltip {
  constructor(root) {
    this.root = root;
    this.element = root.appendChild(h('div', { class: 'mv-tip', hidden: true, 'aria-hidden': 'true' }));
  }

  // `mouse` is the event that Plotly passes on; a scripted hover has none and shows no tip.
  show(mouse, lines) {
    if (!mouse?.clientX || !lines.length) return this.hide();
    const { element, root } = this;
    element.replaceChildren(...lines.filter(Boolean).map((line) => h('p', {}, line)));
    element.hidden = false;
    const frame = root.getBoundingClientRect();
    const zoom = frame.width / root.offsetWidth;
    const x = (mouse.clientX - frame.left) / zoom;
    const y = (mouse.clientY - frame.top) / zoom;
    const left = x + AWAY + element.offsetWidth > root.offsetWidth ? x - AWAY - element.offsetWidth : x + AWAY;
    const top = y + AWAY + element.offsetHeight > root.offsetHeight ? y - AWAY - element.offsetHeight : y + AWAY;
    element.style.translate = `${Math.max(4, left)}px ${Math.max(4, top)}px`;
    return undefined;
  }

  hide() {
    this.element.hidden = true;
  }
}

// Hover of a tree's node: before the backbone was asked, only what its head said.
export function nodeLines({ view, phase }, row) {
  const told = view.rows[String(row)];
  if (!told) return [];
  return phase > 1 && row !== 0 ? [told.place, told.sentence, told.judged, told.drafted] : [told.place, told.drafted];
}

// Hover of a mask cell: why this row may, or may not, see that column.
export function cellLines({ view, selection, t }, row, column) {
  const [own, other] = [selection.nodes.get(row), selection.nodes.get(column)];
  const names = { row: view.rows[String(row)]?.name, column: view.rows[String(column)]?.name };
  if (!own || !other || !names.row || !names.column) return [];
  return [t(`ui.mask_${relation(selection, own, other)}`, names)];
}

function relation(selection, own, other) {
  if (own === other) return 'self';
  if (selection.ancestors(own.row).includes(other.row)) return 'ancestor';
  if (own.depth === other.depth) return 'rival';
  return own.depth < other.depth ? 'later' : 'closed';
}
