// The spine: transport, phase bar, headline, status line, and the play loop.

import { milliseconds, sleep } from './dom.js';
import { cutLine } from './whole.js';

const SPEEDS = [0.5, 1, 2, 4, 16];
const PERIOD_MS = 1500;
const SHARE_STEPS = 8;
const PATH_KNOWN = 3;

export function createControls(app) {
  const { parts, t } = app;
  parts.writeStatus = cutLine(parts.status);
  for (const speed of SPEEDS) {
    parts.speed.add(new Option(t('ui.speed_value', { value: speed }), speed, speed === 1, speed === 1));
  }
  for (const action of ['step', 'back', 'forward', 'reset']) {
    parts[action].addEventListener('click', () => {
      app.stop();
      app.motion.skip();
      app.act(action);
    });
  }
  parts.verify.addEventListener('click', () => app.act('verify'));
  parts.play.addEventListener('click', () => play(app));
  parts.pause.addEventListener('click', () => app.stop());
  parts.phases.forEach((button) => button.addEventListener('click', () => app.setPhase(Number(button.dataset.phase))));

  return {
    draw(view) {
      const { can } = view.run;
      parts.step.disabled = !can.step;
      parts.step.title = can.step ? '' : view.run.verify_blocked;
      for (const action of ['back', 'forward', 'reset']) parts[action].disabled = !can[action];
      parts.play.disabled = !can.play;
      parts.verify.hidden = !view.run.verify;
      parts.verify.textContent = view.run.verify;
      parts.verify.disabled = view.run.verify_blocked !== '';
      parts.verify.title = view.run.verify_blocked;
      drawPhases(app, view);
      this.phase();
    },
    phase() {
      for (const button of parts.phases) {
        const own = Number(button.dataset.phase);
        button.setAttribute('aria-pressed', String(own === app.phase));
        button.toggleAttribute('data-done', own < app.phase);
      }
      tell(app);
    },
  };
}

// Headline and Step say what the phase has revealed, no more.
function tell({ view, phase, parts, t }) {
  const n = view.tree.nodes.length - 1;
  const passed = view.tree.nodes.filter((node) => ['accepted', 'shorter', 'behind', 'cut'].includes(node.verdict)).length;
  const early = view.run.pending && phase < PATH_KNOWN && view.phases[1].ms !== null;
  const revealed = phase === 1 ? t('ui.headline_propose', { n }) : t('ui.headline_verify', { n: n + 1, passed });
  const text = early ? revealed : view.headline.text;
  if (parts.headline.textContent !== text) parts.headline.textContent = text;
  parts.headline.title = early ? '' : `${text} ${view.headline.hint}`;
  parts.step.textContent = early ? t('ui.step') : view.run.step_label;
}

// Widths follow the measured milliseconds, in eighths, so that noise does not make them tremble.
function drawPhases(app, view) {
  const total = view.phases.reduce((sum, phase) => sum + (phase.ms ?? 0), 0) || 1;
  view.phases.forEach((phase, index) => {
    const button = app.parts.phases[index];
    button.style.flexGrow = 1 + Math.round(SHARE_STEPS * (phase.ms ?? 0) / total);
    const ms = phase.ms === null ? '' : app.t('ui.ms', { ms: milliseconds(phase.ms) });
    button.lastElementChild.textContent = [ms, phase.note].filter(Boolean).join(', ');
    button.toggleAttribute('data-noted', phase.note !== '');
    button.title = [app.t(`ui.${phase.name}_hint`), phase.hint].filter(Boolean).join(' ');
  });
}

// The page drives: one step, its motion, then the rest of the period. Pause ends the loop after the step under way.
async function play(app) {
  if (app.playing) return;
  const run = Symbol('play');
  app.playing = run;
  app.showPlaying(true);
  while (app.playing === run) {
    const started = performance.now();
    const view = await app.act('step');
    if (!view || !view.run.can.play || view.status.state === 'error') break;
    if (app.playing !== run) return;
    const left = app.period() - (performance.now() - started);
    if (left > 0) await sleep(left);
    await app.motion.done;
  }
  if (app.playing === run) app.stop();
}

export function playback(app) {
  const { parts } = app;
  return {
    period: () => PERIOD_MS / Number(parts.speed.value),
    stop() {
      app.playing = null;
      app.showPlaying(false);
    },
    showPlaying(on) {
      const focused = [parts.play, parts.pause].includes(document.activeElement);
      parts.play.hidden = on;
      parts.pause.hidden = !on;
      parts.root.dataset.playing = String(on);
      if (focused) (on ? parts.pause : parts.play).focus();
    },
  };
}

// One status line: a notice (an error, a place in the queue) goes before the state of the model.
export function drawStatus(app, status, run) {
  const { parts } = app;
  parts.status.dataset.state = status.notice && status.state === 'ready' ? 'notice' : status.state;
  parts.writeStatus(app.said || status.notice || status.text);
  parts.model.textContent = status.title;
  parts.root.dataset.model = status.state;
  parts.banner.textContent = run.banner;
  parts.banner.hidden = !run.banner;
  parts.banner.dataset.ready = String(status.state === 'ready');
  parts.progress.hidden = !status.loading;
  parts.progress.toggleAttribute('data-unknown', status.fraction === null);
  parts.progress.style.setProperty('--fraction', status.fraction ?? 0.3);
}
