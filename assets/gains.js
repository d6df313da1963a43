// Gains: how much each node was expected to bring, best first, beside what the step accepted.

import { h, symbol } from './dom.js';

const PATH_KNOWN = 3;

export function createGains(app) {
  const { parts, t } = app;
  parts.gains.addEventListener('click', (event) => {
    const line = event.target.closest('[data-row]');
    if (line) app.selection.select(Number(line.dataset.row));
  });
  const draw = () => {
    const { view: { gains }, selection, phase } = app;
    const most = gains.rows[0]?.value || 1;
    parts.gains.replaceChildren(
      h('p', { class: 'mv-verdict-head' }, phase < PATH_KNOWN ? gains.expected : gains.note),
      ...gains.rows.map(({ row, value, text }) => {
        const node = selection.nodes.get(row);
        const path = selection.ancestors(row).slice(1).map((one) => selection.nodes.get(one).text);
        return h('div', { class: 'mv-gain', 'data-row': row, 'data-verdict': phase > 1 ? node.verdict : 'unverified',
          'data-selected': row === selection.row, title: t('ui.gains_hint', { text: path.join(' ') }) },
        phase > 1 ? symbol(node.verdict) : symbol('unverified'),
        h('code', { class: 'mv-token', lang: 'und' }, path.join(' ')),
        h('span', { class: 'mv-gain-bar' }, h('i', { style: `width:${(100 * value / most).toFixed(1)}%` })),
        h('span', { class: 'mv-number' }, text));
      }));
  };
  return { draw, select: draw, phase: draw };
}
