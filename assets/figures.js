// Tree and mask: Plotly figures that share the selection.

import { h } from './dom.js';
import { maskMarks, Plot, treeMarks } from './plots.js';

const LINE_FOR_TWO = 25;
const LABEL = 10;
const PATH_KNOWN = 3;
const LENS = 3;

export function createTree(app) {
  const { parts, selection, options } = app;
  const plot = new Plot(parts.treePlot, {
    name: 'tree', palette: options.palette.dark,
    onClick: ({ customdata: target }) => {
      if (Number.isInteger(target)) selection.select(target);
      else if (String(target).startsWith('fold:')) app.act('open', { path: selection.nodes.get(Number(target.slice(5))).path });
      parts.outline.focus({ preventScroll: true });
    },
    onHover: (point) => selection.hover(point && Number.isInteger(point.customdata) ? point.customdata : null),
  });
  const at = (node) => (node.x === null || node.x === undefined ? null : [node.x, node.y]);
  return {
    plot,
    draw(phase) {
      const { tree } = app.view;
      plot.marks = treeMarks(selection, plot.ink, at);
      return plot.draw(fitted(tree.data[phase - 1], tree.figure.layout, plot.host), tree.figure.layout);
    },
    select: () => plot.mark(treeMarks(selection, plot.ink, at)),
  };
}

// Figures are drawn for one size. Where a window leaves less, what would collide goes: first the probabilities under
// the tree's labels, then every second of the mask's row labels.
function fitted(data, layout, host) {
  const [bottom, top] = layout.yaxis.range ?? [1, 0];
  const line = (host.clientHeight - (layout.margin?.t ?? 0)) / (bottom - top);
  return line >= LINE_FOR_TWO ? data : data.filter((trace) => trace.name !== 'probabilities');
}

function fittedLabels(layout, host) {
  const { tickvals, ticktext, range: [bottom, top] = [1, 0] } = layout.yaxis;
  if (!tickvals?.length) return layout;
  const line = (host.clientHeight - layout.margin.t - layout.margin.b) / (bottom - top);
  const gap = Math.min(...tickvals.slice(1).map((value, index) => value - tickvals[index]));
  const every = Math.max(1, Math.ceil(LABEL / (gap * line)));
  const kept = (values) => values.filter((_, index) => index % every === 0);
  return { ...layout, yaxis: { ...layout.yaxis, tickvals: kept(tickvals), ticktext: kept(ticktext) } };
}

export function createMask(app) {
  const { parts, selection, options } = app;
  const rowAt = (point) => (point && selection.nodes.has(point.y) ? point.y : null);
  const plot = new Plot(parts.maskPlot, {
    name: 'mask', palette: options.palette.dark,
    onClick: (point) => {
      selection.select(rowAt(point));
      parts.mask.focus({ preventScroll: true });
    },
    onHover: (point) => selection.hover(rowAt(point)),
  });
  const marks = () => maskMarks(selection, plot.ink, app.view.mask.rows.length, (row) => row);
  return {
    plot,
    draw(view) {
      plot.marks = marks();
      const { data, layout } = view.mask.figure;
      const shown = app.phase < PATH_KNOWN ? data.filter((trace) => trace.name !== 'kept') : data;
      plot.draw(shown, fittedLabels(layout, plot.host));
    },
    phase() {
      this.draw(app.view);
    },
    select() {
      plot.mark(marks());
      drawLens(app);
    },
  };
}

// In the overview a row is thinner than a pixel: the rows round the selected one are spelt out in the corner that no
// mask ever fills, since a row sees no later row.
function drawLens({ view, selection, parts, t }) {
  parts.lens.hidden = !view.mask.lens;
  if (!view.mask.lens) return;
  const first = Math.max(0, Math.min(selection.shown.row - LENS, view.mask.rows.length - 1 - 2 * LENS));
  parts.lens.replaceChildren(...view.mask.rows.slice(first, first + 2 * LENS + 1).map(({ row, text }) =>
    h('p', { 'data-selected': row === selection.row },
      t('ui.lens', { row: String(row), text, rows: selection.ancestors(row).join(' ') }))));
}
