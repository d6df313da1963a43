// Motion shows the order of a step. It never delays data, is skipped by any key, and stays off where it is unwanted.

import { sleep } from './dom.js';

const COMMIT = 300;
const PROPOSE = 240;
const VERIFY = 200;
const ACCEPT = 150;
const MOST = 1200;
const FASTEST_PERIOD = 500;

export class Motion {
  constructor(parts, plot) {
    Object.assign(this, { parts, plot });
    this.done = Promise.resolve();
    this.reduced = matchMedia('(prefers-reduced-motion: reduce)');
    this.abort = null;
  }

  // Wanted for one step forward, seen, and not faster than two steps a second.
  wanted(before, view, period) {
    return !this.reduced.matches && !document.hidden && before !== null && before.tree && view.tree
      && view.steps.index === before.steps.index + 1 && period >= FASTEST_PERIOD && this.plot.host.clientWidth > 0;
  }

  get running() {
    return this.abort !== null;
  }

  skip() {
    this.abort?.abort();
  }

  // Plays commit of the old step, then propose, verify and accept of the new one. `draw(phase)` draws the new
  // tree; without a phase it draws what the page shows by then, so a skipped motion ends there too.
  reveal(before, view, draw, budget) {
    this.skip();
    const abort = new AbortController();
    this.abort = abort;
    this.parts.root.dataset.moving = '';
    const path = view.tree.nodes.filter((node) => ['root', 'accepted', 'cut'].includes(node.verdict) || node.row === 0);
    const total = COMMIT + PROPOSE + VERIFY + ACCEPT * path.length;
    const pace = Math.min(1, Math.min(MOST, budget) / total);
    this.done = this.run(before, path, draw, pace, abort.signal).finally(() => {
      if (this.abort !== abort) return;
      this.abort = null;
      delete this.parts.root.dataset.moving;
      this.parts.overlay.replaceChildren();
    });
    return this.done;
  }

  async run(before, path, draw, pace, signal) {
    const { treePlot, overlay } = this.parts;
    const part = async (element, frames, ms) => {
      if (signal.aborted) return;
      const animation = element.animate(frames, { duration: ms * pace, easing: 'ease-out' });
      const stop = () => animation.finish();
      signal.addEventListener('abort', stop, { once: true });
      await animation.finished.catch(() => {});
      signal.removeEventListener('abort', stop);
    };
    this.glide(before.tree.ghost, path[0], COMMIT * pace, signal);
    await part(treePlot, [{ opacity: 1 }, { opacity: 0.15 }], COMMIT);
    if (!signal.aborted) await draw(1);
    await part(treePlot, [{ opacity: 0 }, { opacity: 1 }], PROPOSE);
    if (!signal.aborted) await draw(2);
    await part(overlay, [{ backgroundColor: 'var(--flash)' }, { backgroundColor: 'transparent' }], VERIFY);
    for (const node of path) await this.visit(node, ACCEPT * pace, signal);
    await draw();
  }

  // The token the backbone wanted becomes the next root.
  glide(ghost, root, ms, signal) {
    const from = ghost && this.plot.pixel(ghost.x, ghost.y);
    const to = root && this.plot.pixel(root.x, root.y);
    if (!from || !to || signal.aborted) return;
    const mark = this.mark('mv-ghost');
    const animation = mark.animate([{ translate: `${from.left}px ${from.top}px` }, { translate: `${to.left}px ${to.top}px` }],
      { duration: ms, easing: 'ease-in-out', fill: 'forwards' });
    animation.finished.then(() => mark.remove(), () => {});
  }

  async visit(node, ms, signal) {
    const at = this.plot.pixel(node.x, node.y);
    if (!at || signal.aborted) return;
    const mark = this.mark('mv-visit');
    mark.style.translate = `${at.left}px ${at.top}px`;
    await Promise.race([sleep(ms), new Promise((resolve) => signal.addEventListener('abort', resolve, { once: true }))]);
  }

  mark(name) {
    const element = document.createElement('i');
    element.className = name;
    this.parts.overlay.append(element);
    return element;
  }
}
