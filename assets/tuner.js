// The Tuner page: advice, sources and the choice of a tree on the left; the tree and its comparisons in the middle;
// what is known of heads and device on the right.

import { h } from './dom.js';
import { createCharts, createKnown } from './tuner_charts.js';
import { createExchange, createFollowing } from './tuner_exchange.js';
import { createSide } from './tuner_side.js';
import { createTabs } from './tuner_tabs.js';
import { createTree } from './tuner_tree.js';

export function create(page) {
  const { element, t } = page;
  page.link.merged = ['choose', 'show', 'room'];
  const charts = createCharts(page);
  const known = createKnown(page);
  const side = createSide(page, { measure: () => charts.open('measured') });
  const tree = createTree(page);
  const following = createFollowing(page);
  const exchange = createExchange(page);
  const more = createTabs(t('tuner.tab_following'), [
    ['following', t('tuner.tab_following'), following.element], ['exchange', t('tuner.tab_exchange'), exchange.element]]);
  more.element.classList.add('mv-tuner-more');
  element.append(page.notice, side.element,
    h('div', { class: 'mv-tuner-middle' }, tree.element, charts.element),
    h('div', { class: 'mv-tuner-known' }, known.heat, known.latency, more.element));
  const parts = [charts, known, tree, following, exchange];
  const have = {};

  return {
    draw(view) {
      element.dataset.ready = String(view.ready);
      side.draw(view);
      if (!view.ready) return;
      for (const [name, { key, body }] of Object.entries(view.parts)) {
        if (!body || have[name] === key) continue;
        have[name] = key;
        parts.find((part) => part.names.includes(name))?.take(name, body, key);
      }
      for (const part of parts) part.draw?.(view);
    },
    have: () => ({ have }),
    close: () => tree.pause(),
    theme(dark) {
      for (const part of parts) part.theme?.(dark);
    },
  };
}
