// The charts: each a figure that the server made, with its legend above and what it means below.

import { h } from './dom.js';
import { legendKeys } from './legend.js';
import { Plot } from './plots.js';
import { createTabs } from './tuner_tabs.js';

// One figure in its box. `caption` is what it says while the server sends none of its own.
export function createChart(page, name, { caption = '', empty = '' } = {}) {
  const { t, options } = page;
  const legend = h('div', { class: 'mv-curve-legend' });
  const nothing = h('p', { class: 'mv-empty' }, empty);
  const host = h('div', { class: 'mv-plot', role: 'group', 'aria-label': t(`tuner.${name}`) });
  const note = h('p', { class: 'mv-chart-note' }, caption);
  const box = h('div', { class: 'mv-curve-box', 'data-chart': name }, host, nothing);
  const plot = new Plot(host, { name: `tuner-${name}`, palette: options.palette.dark, still: true });
  let entries = [];
  let dark = page.dark();
  const dress = () => legend.replaceChildren(...legendKeys(entries, dark ? options.palette.dark : {}));
  plot.setTheme(dark);
  return {
    legend, box, note,
    take({ figure, legend: keys, points, caption: said, hint }, key) {
      entries = keys;
      dress();
      host.style.visibility = points ? 'visible' : 'hidden';
      nothing.hidden = points > 0;
      box.dataset.points = points;
      if (said !== undefined) note.textContent = said;
      if (hint !== undefined) note.title = hint;
      if (!points) return;
      const { data, layout } = JSON.parse(figure);
      plot.draw(data, layout, key);
    },
    theme(on) {
      dark = on;
      plot.setTheme(on);
      dress();
    },
  };
}

// Heat map and step times, each a panel of its own.
export function createKnown(page) {
  const { t } = page;
  const heat = createChart(page, 'heat', { empty: t('tuner.heat_none') });
  const latency = createChart(page, 'latency', { empty: t('tuner.latency_none') });
  const panel = (name, chart) => h('section', { class: 'mv-panel', id: `tuner-panel-${name}`, 'aria-label': t(`tuner.${name}`) },
    h('div', { class: 'mv-panel-head' }, h('h2', {}, t(`tuner.${name}`)), chart.legend), chart.box);
  const charts = { heat, latency };
  return {
    names: ['heat', 'latency'], heat: panel('heat', heat), latency: panel('latency', latency),
    take: (name, body, key) => charts[name].take(body, key),
    theme: (dark) => Object.values(charts).forEach((chart) => chart.theme(dark)),
  };
}

// Trees compared, in tabs.
export function createCharts(page) {
  const { t } = page;
  const charts = Object.fromEntries(['speed', 'steps', 'reached', 'scatter'].map((name) => [name, createChart(page, `tab_${name}`, {
    caption: name === 'reached' ? '' : t(`tuner.${name}_note`), empty: t(name === 'reached' ? 'tuner.reached_chart_none' : `tuner.${name}_none`) })]));
  const measured = createMeasured(page);
  const thresholds = createThresholds(page);
  const plain = ({ legend, box, note }) => h('div', { class: 'mv-chart' }, legend, box, note);
  const tabs = createTabs(t('tuner.charts'), [
    ...Object.entries(charts).map(([name, chart]) => [name, t(`tuner.tab_${name}`), plain(chart)]),
    ['measured', t('tuner.tab_measured'), measured.element], ['thresholds', t('tuner.tab_thresholds'), thresholds.element]]);
  tabs.element.classList.add('mv-tuner-charts');
  return {
    names: [...Object.keys(charts), 'measured', 'thresholds'], element: tabs.element, open: tabs.open,
    take(name, body, key) {
      ({ ...charts, measured, thresholds })[name].take(body, key);
    },
    draw(view) {
      measured.draw(view);
      thresholds.draw(view);
    },
    theme(dark) {
      Object.values(charts).forEach((chart) => chart.theme(dark));
      measured.theme(dark);
      thresholds.theme(dark);
    },
  };
}

const COLUMNS = ['name', 'rate', 'expected', 'replayed', 'ms', 'speed', 'predicted', 'gain', 'equal'];

// Decoding for real: what to run, and what came of it beside what was predicted.
function createMeasured(page) {
  const { t, options } = page;
  const extent = h('select', { id: 'measure-extent', 'aria-label': t('tuner.extent') });
  const more = h('input', { type: 'checkbox', id: 'measure-more' });
  const sampled = h('input', { type: 'checkbox', id: 'measure-sampled' });
  const run = h('button', { id: 'measure-run', class: 'mv-action', title: t('tuner.measure_hint'),
    onclick: () => page.act('measure', { extent: extent.value, more: more.checked, sampled: sampled.checked }) }, t('tuner.measure'));
  const note = h('p', { class: 'mv-chart-note' });
  const body = h('tbody');
  const table = h('table', { class: 'mv-measured' }, h('thead', {}, h('tr', {},
    ...COLUMNS.map((name) => h('th', { scope: 'col' }, t(`tuner.col_${name}`))))), body);
  let rows = [];
  let dark = page.dark();

  function draw() {
    const shown = (color) => (dark ? options.palette.dark[color] ?? color : color);
    body.replaceChildren(...rows.map((row) => h('tr', { 'data-kind': row.kind },
      h('th', { scope: 'row' }, h('b', { style: `color:${shown(row.look.color)}` }, row.look.glyph), row.name),
      ...COLUMNS.slice(1).map((name) => (name === 'equal' ? h('td', { 'data-equal': row.equal.state }, row.equal.text)
        : h('td', {}, row[name]))))));
    table.hidden = rows.length === 0;
  }

  return {
    element: h('div', { class: 'mv-chart mv-chart-table' }, h('div', { class: 'mv-chart-tools' }, extent, run,
      h('label', {}, more, t('tuner.measure_more')), h('label', {}, sampled, t('tuner.measure_sampled'))),
    h('div', { class: 'mv-measured-box', tabindex: 0 }, table, note)),
    take(part) {
      rows = part.rows;
      note.textContent = part.note;
      draw();
    },
    draw({ plans, job }) {
      fill(extent, Object.entries(plans.measure));
      run.disabled = Boolean(job?.live);
    },
    theme(on) {
      dark = on;
      draw();
    },
  };
}

function createThresholds(page) {
  const { t } = page;
  const chart = createChart(page, 'tab_thresholds', { empty: t('tuner.thresholds_none') });
  const extent = h('select', { id: 'study-extent', 'aria-label': t('tuner.extent') });
  const run = h('button', { id: 'study-run', class: 'mv-action', onclick: () => page.act('thresholds', { extent: extent.value }) }, t('tuner.study'));
  const proxy = h('select', { id: 'study-proxy', 'aria-label': t('tuner.proxy'), onchange: () => page.act('show', { proxy: proxy.value }) },
    ...['surprise', 'distinct_3', 'repeated_4'].map((name) => new Option(t(`tuner.proxy_${name}`), name)));
  return {
    element: h('div', { class: 'mv-chart' }, h('div', { class: 'mv-chart-tools' }, extent, run, proxy, chart.legend), chart.box, chart.note),
    take: chart.take,
    draw({ plans, job, controls }) {
      fill(extent, Object.entries(plans.study));
      run.disabled = Boolean(job?.live);
      proxy.value = controls.proxy;
    },
    theme: chart.theme,
  };
}

// Options by value and label; nothing is touched while they stay the same.
export function fill(select, entries) {
  const key = JSON.stringify(entries);
  if (select.dataset.key === key) return;
  const { value } = select;
  select.dataset.key = key;
  select.replaceChildren(...entries.map(([name, label]) => new Option(label, name)));
  if (entries.some(([name]) => name === value)) select.value = value;
}
