// The four figures of a run, each under its name and legend.

import { h } from './dom.js';
import { legendKeys } from './legend.js';
import { Plot } from './plots.js';

const NAMES = ['loss', 'top1', 'held_out', 'rates'];

export function createPlots(page) {
  const { t, options } = page;
  let dark = false;
  let drawn = {};
  const panels = Object.fromEntries(NAMES.map((name) => [name, panel(name)]));
  const element = h('div', { class: 'mv-curves', role: 'group', 'aria-label': t('train.curves') },
    ...NAMES.map((name) => panels[name].element));

  function panel(name) {
    const legend = h('div', { class: 'mv-curve-legend' });
    const empty = h('p', { class: 'mv-empty' }, t('train.nothing'));
    const host = h('div', { class: 'mv-plot', role: 'group', 'aria-label': t(`train.${name}`) });
    const own = h('section', { class: 'mv-panel mv-curve', id: `curve-${name.replace('_', '-')}`, 'aria-label': t(`train.${name}`) },
      h('div', { class: 'mv-panel-head' }, h('h2', {}, t(`train.${name}`)), legend), h('div', { class: 'mv-curve-box' }, host, empty));
    const plot = new Plot(host, { name: `train-${name}`, palette: options.palette.dark, still: true });
    return { element: own, legend, empty, host, plot };
  }

  const drawLegends = () => NAMES.forEach((name) => panels[name].legend.replaceChildren(...legendKeys(drawn[name]?.legend ?? [], dark ? options.palette.dark : {})));

  return {
    element,
    draw(figures, version) {
      drawn = figures;
      for (const name of NAMES) {
        const { plot, host, empty, element: own } = panels[name];
        const { figure, points } = figures[name];
        host.style.visibility = points ? 'visible' : 'hidden';
        empty.hidden = points > 0;
        own.dataset.points = points;
        if (points) {
          const { data, layout } = JSON.parse(figure);
          plot.draw(data, layout, `${name}|${version}`);
        }
      }
      drawLegends();
    },
    theme(on) {
      dark = on;
      for (const name of NAMES) panels[name].plot.setTheme(on);
      drawLegends();
    },
  };
}
