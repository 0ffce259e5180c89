// Charts, drawn by Bokeh when they scroll into view. All texts of a chart are data.
const DASHES = ["solid", "dashed", "dotted", "dotdash"];
function smoothed(values, weight) { // exponential moving average; gaps stay gaps
  let mean = 0, mass = 0;
  return values.map(v => {
    if (v === null) return NaN;
    mean = weight * mean + (1 - weight) * v; mass = weight * mass + 1 - weight;
    return mean / mass;
  });
}
async function drawChart(place, state) {
  const {lines, marks, days} = JSON.parse(place.dataset.chart), css = getComputedStyle(place), weight = Number(state.smooth) || 0;
  const figure = Bokeh.Plotting.figure({
    height: place.clientHeight, sizing_mode: "stretch_width", toolbar_location: "above", tools: "pan,box_zoom,wheel_zoom,reset,save",
    x_axis_type: days ? "datetime" : "linear", y_axis_type: state.log ? "log" : "linear", y_range: new Bokeh.DataRange1d({only_visible: true}),
  });
  const drawn = place.drawn = new Map(), bands = lines.some(l => l.low), notes = lines.some(l => l.notes.length), main = [];
  for (const line of lines) {
    const color = css.getPropertyValue(line.colour).trim(), visible = isShown(place, line.index), raw = n => (line[n] || line.y).map(v => v ?? NaN);
    const data = {x: line.x, y: smoothed(line.y, weight), raw: raw("y")};
    if (bands) Object.assign(data, {low: raw("low"), high: raw("high")});
    if (notes) data.note = line.notes;
    const x = {field: "x"}, y = {field: "y"}, style = {source: new Bokeh.ColumnDataSource({data}), line_color: color, visible}, parts = [];
    if (bands) parts.push(figure.varea(x, {field: "low"}, {field: "high"}, {source: style.source, fill_color: color, fill_alpha: 0.18, visible}));
    if (weight) parts.push(figure.line(x, {field: "raw"}, {...style, line_alpha: 0.3}));
    main.push(figure.line(x, y, {...style, line_width: 2, line_dash: DASHES[line.dash], name: line.name}));
    if (line.x.length < 50) parts.push(figure.scatter(x, y, {...style, fill_color: color, size: 5}));
    drawn.set(line.index, [...parts, main.at(-1)]);
  }
  const tooltips = [["", "$name"], days ? ["night", "@x{%F}"] : ["step", "@x"], ["value", "@raw"]];
  if (bands) tooltips.push(["from", "@low"], ["to", "@high"]);
  if (notes) tooltips.push(["", "@note"]);
  figure.add_tools(new Bokeh.HoverTool({mode: main.length > 1 ? "mouse" : "vline", renderers: main, toggleable: false, tooltips, formatters: days ? {"@x": "datetime"} : {}}));
  figure.toolbar.logo = null;
  for (const location of marks) figure.add_layout(new Bokeh.Span({location, dimension: "height", line_dash: "dashed", line_color: css.getPropertyValue("--moved").trim()}));
  await Bokeh.Plotting.show(figure, place);
}
let chartState = null, chartKey = "";
const inSight = new IntersectionObserver(seen => {
  for (const e of seen) if (e.isIntersecting) { inSight.unobserve(e.target); drawChart(e.target, chartState); }
}, {rootMargin: "200px"});
function showCharts(state, dark) {
  const key = [state.log, state.smooth, dark].join(), charts = $$(".chart");
  if (!charts.length || key === chartKey) return;
  if (!chartKey) Bokeh.logger.set_level("error");
  chartKey = key; chartState = {...state};
  for (const chart of charts) { chart.replaceChildren(); chart.drawn = null; inSight.observe(chart); }
}
function isShown(chart, line) { // false if its line or its arm is hidden
  const box = $(`input[data-line="${line}"]`, chart.closest(".plot-of"));
  return !box || (box.checked && !box.closest(".off"));
}
function linesOf(chart) { for (const [line, parts] of chart.drawn || []) for (const part of parts) part.visible = isShown(chart, line); }
