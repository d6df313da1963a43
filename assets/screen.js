// How much room there is: attributes for the style sheet, the projector, and what the server draws the figures for.

const PROJECTOR = 1.55;
const LEAST_WIDTH = 1024;
const FOLD = { plain: 64, projector: 24 };
const NEAR = 8;
const SETTLE_MS = 150;
const STORED = 'medusa-viz-projector';
const KINDS = {
  wide: (width) => width >= 1800,
  low: (width, height) => height < 860 && width >= 1024,
  narrow: (width) => width < 1400,
  small: (width) => width < 1280,
  tablet: (width) => width < 1024,
  phone: (width) => width < 768,
};

// Storage may be closed to us (private windows, embedded frames); what is chosen then lasts as long as the page.
export function recall(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

export function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // Nothing to keep it in.
  }
}

// The projector enlarges the whole page, so the page is laid out as for a smaller window.
export class Screen {
  constructor(root) {
    this.root = root;
    this.projector = recall(STORED) === 'on';
    this.measure();
    addEventListener('resize', () => this.measure());
  }

  get phone() {
    return this.root.hasAttribute('data-phone');
  }

  measure() {
    const zoom = this.projector ? Math.max(1, Math.min(PROJECTOR, innerWidth / LEAST_WIDTH)) : 1;
    const { style } = this.root;
    if (zoom > 1) style.setProperty('--zoom', zoom);
    else style.removeProperty('--zoom');
    this.root.toggleAttribute('data-projector', zoom > 1);
    for (const [name, holds] of Object.entries(KINDS)) {
      this.root.toggleAttribute(`data-${name}`, holds(innerWidth / zoom, innerHeight / zoom));
    }
  }

  toggle() {
    this.projector = !this.projector;
    remember(STORED, this.projector ? 'on' : 'off');
    this.measure();
  }

  // Tells the server how large the figures are, once they stand still and where that makes a difference.
  report(app, told = { tree: [694, 488], mask: [470, 266], fold: FOLD.plain }) {
    let timer = null;
    const room = (host, old) => {
      const now = [host.clientWidth, host.clientHeight];
      return now.some((side) => side === 0) || now.every((side, at) => Math.abs(side - old[at]) < NEAR) ? old : now;
    };
    const look = () => {
      const { treePlot, maskPlot } = app.parts;
      const now = { tree: room(treePlot, told.tree), mask: room(maskPlot, told.mask),
        fold: this.projector ? FOLD.projector : FOLD.plain };
      if (now.tree === told.tree && now.mask === told.mask && now.fold === told.fold) return;
      told = now;
      app.act('screen', now);
    };
    const observer = new ResizeObserver(() => {
      clearTimeout(timer);
      timer = setTimeout(look, SETTLE_MS);
    });
    observer.observe(app.parts.treePlot);
    observer.observe(app.parts.maskPlot);
    app.parts.projector.setAttribute('aria-pressed', String(this.projector));
    app.parts.projector.addEventListener('click', () => {
      this.toggle();
      app.parts.projector.setAttribute('aria-pressed', String(this.projector));
      look();
    });
  }
}
