// Plotly in place: one figure per host, redrawn at most once a frame, coloured for the theme, sized by its host.

import { frame } from './dom.js';

const INK = { light: '#1F2933', dark: '#F3F4F6' };
const HALO_LIMIT = 120;
const CROSS = '#7B8794';

export class Plot {
  // onClick and onHover get the Plotly point, onHover the mouse event too; it gets null when the mouse leaves.
  // A `still` figure does not zoom under the wheel, which then scrolls what it stands in.
  constructor(host, { name, palette, onClick = () => {}, onHover = () => {}, still = false }) {
    Object.assign(this, { host, name, palette, onClick, onHover, still });
    this.plot = host.appendChild(document.createElement('div'));
    this.marks = [];
    this.dark = false;
    this.waiting = null;
    new ResizeObserver(() => this.resize()).observe(host);
  }

  // Draws the newest figure on the next frame; resolves once it is on screen (at once while the host is hidden).
  // A figure with the key of the one on screen is the same and is only marked.
  draw(data, layout, key = null) {
    if (key !== null && key === this.key) {
      this.mark(this.marks);
      return this.waiting ?? Promise.resolve();
    }
    this.key = key;
    this.figure = { data, layout };
    this.waiting ??= frame().then(() => {
      this.waiting = null;
      return this.react();
    });
    return this.waiting;
  }

  async react() {
    const width = this.host.clientWidth;
    const height = this.host.clientHeight;
    if (!this.figure || !width || !height) return;
    const { data, layout } = this.dark ? recolour(this.figure, this.palette) : this.figure;
    const full = { ...layout, xaxis: { ...layout.xaxis }, yaxis: { ...layout.yaxis }, width, height, autosize: false,
      shapes: [...(layout.shapes ?? []), ...this.marks] };
    full.uirevision ??= this.name;
    await globalThis.Plotly.react(this.plot, data, full, config(this.still));
    this.size = `${width}×${height}`;
    this.bind();
  }

  bind() {
    if (this.bound) return;
    this.bound = true;
    this.plot.on('plotly_click', (event) => this.onClick(event.points[0]));
    this.plot.on('plotly_hover', (event) => this.onHover(event.points[0], event.event));
    this.plot.on('plotly_unhover', () => this.onHover(null));
  }

  // Selection, halo and hover are shapes: a relayout of a millisecond or two at any size, never a restyle.
  mark(shapes) {
    this.marks = shapes;
    if (!this.bound || this.waiting) return;
    globalThis.Plotly.relayout(this.plot, { shapes: [...(this.figure.layout.shapes ?? []), ...shapes] });
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.host;
    if (width && height && this.size !== `${width}×${height}` && this.figure) {
      this.redraw();
    }
  }

  setTheme(dark) {
    this.dark = dark;
    if (this.figure) this.redraw();
  }

  redraw() {
    const { key } = this;
    this.key = null;
    this.draw(this.figure.data, this.figure.layout, key);
  }

  // Pixel position of a data point inside the host, or null before the first draw.
  pixel(x, y) {
    const { xaxis, yaxis } = this.plot._fullLayout ?? {};
    if (!xaxis) return null;
    return { left: xaxis._offset + xaxis.d2p(x), top: yaxis._offset + yaxis.d2p(y) };
  }

  get ink() {
    return this.dark ? INK.dark : INK.light;
  }
}

function config(still) {
  const zoom = !still && matchMedia('(min-width: 1024px)').matches; // the page itself does not scroll, so the wheel can zoom
  return { showSendToCloud: false, displaylogo: false, displayModeBar: false, responsive: false, scrollZoom: zoom,
    doubleClick: 'reset' };
}


// The figure with every light colour replaced by its dark partner. Only values under a colour key are looked at, so
// that a token which spells a colour keeps its text.
function recolour(value, table, inColour = false) {
  if (typeof value === 'string') return inColour ? table[value.toUpperCase()] ?? value : value;
  if (Array.isArray(value)) return value.map((item) => recolour(item, table, inColour));
  if (!value || typeof value !== 'object' || ArrayBuffer.isView(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) =>
    [key, recolour(item, table, inColour || /color/i.test(key))]));
}

function ring(x, y, radius, line, fill = 'rgba(0,0,0,0)', layer = 'above') {
  return { type: 'circle', xsizemode: 'pixel', ysizemode: 'pixel', xanchor: x, yanchor: y,
    x0: -radius, x1: radius, y0: -radius, y1: radius, line, fillcolor: fill, layer };
}

// Tree: a halo behind every node of the same head and rank, a ring on the selected and on the hovered node.
export function treeMarks(selection, ink, at) {
  const shapes = [];
  const none = { width: 0 };
  for (const node of selection.same(selection.shown).slice(0, HALO_LIMIT)) {
    if (at(node)) shapes.push(ring(...at(node), 11, none, alpha(ink, 0.18), 'below'));
  }
  const { node, preview } = selection;
  if (at(node)) shapes.push(ring(...at(node), 12, { color: ink, width: 3 }));
  const hovered = selection.nodes.get(preview);
  if (hovered && hovered !== node && at(hovered)) shapes.push(ring(...at(hovered), 12, { color: ink, width: 1.5 }));
  return shapes;
}

// A double ring round every node whose verdict is not what it was in the pinned step.
export function differenceMarks(selection, rows, color, at) {
  return rows.slice(0, HALO_LIMIT).map((row) => selection.nodes.get(row)).filter((node) => node && at(node))
    .flatMap((node) => [ring(...at(node), 10, { color, width: 1.5 }), ring(...at(node), 14, { color, width: 1.5 })]);
}

// A grey cross on every cell that a plain causal mask, which sees all earlier rows, would open but the tree closes.
export function causalCrosses(selection) {
  const cells = { x: [], y: [] };
  for (const row of selection.nodes.keys()) {
    const seen = new Set(selection.ancestors(row));
    for (let column = 0; column < row; column += 1) {
      if (seen.has(column)) continue;
      cells.x.push(column);
      cells.y.push(row);
    }
  }
  const size = selection.nodes.size > 25 ? 4 : 7;
  return { type: 'scatter', mode: 'markers', name: 'causal', ...cells, hoverinfo: 'skip',
    marker: { symbol: 'x-thin', size, color: CROSS, line: { color: CROSS, width: 1.2 } } };
}

// Mask: a frame round the selected row and column, a thinner one round the hovered row.
export function maskMarks(selection, ink, count, frameOf) {
  const box = (x0, x1, y0, y1, width) => ({ type: 'rect', x0, x1, y0, y1, line: { color: ink, width }, layer: 'above' });
  const shapes = [];
  if (!count) return shapes;
  const own = frameOf(selection.row);
  if (own !== null) {
    shapes.push(box(-0.5, count - 0.5, own - 0.5, own + 0.5, 2), box(own - 0.5, own + 0.5, -0.5, count - 0.5, 2));
  }
  const other = selection.preview === null ? null : frameOf(selection.preview);
  if (other !== null && other !== own) shapes.push(box(-0.5, count - 0.5, other - 0.5, other + 0.5, 1));
  return shapes;
}

function alpha(hex, opacity) {
  const [r, g, b] = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${r},${g},${b},${opacity})`;
}
