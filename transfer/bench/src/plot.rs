//! The table as a picture: rate over size, both on logarithmic axes, one line for each kind of transfer.

use std::path::Path;

use plotters::prelude::*;

use crate::Outcome;
use crate::measure::Row;

const SIZE: (u32, u32) = (900, 520);

/// A number of bytes as people say it.
fn bytes(len: f64) -> String {
    match len {
        len if len >= f64::from(1 << 20) => format!("{:.0} MiB", len / f64::from(1 << 20)),
        len if len >= 1024.0 => format!("{:.0} KiB", len / 1024.0),
        len => format!("{len:.0} B"),
    }
}

/// Draws the rows as SVG.
pub fn draw(title: &str, rows: &[Row], path: &Path) -> Outcome<()> {
    let of = |value: fn(&Row) -> f64| rows.iter().map(value);
    let smallest = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MAX, f64::min);
    let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MIN, f64::max);
    let x = smallest(&mut of(|row| row.bytes as f64)) / 1.3..largest(&mut of(|row| row.bytes as f64)) * 1.3;
    let y = smallest(&mut of(|row| row.gbit_per_s)) / 1.3..largest(&mut of(|row| row.gbit_per_s)) * 1.3;
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(x.log_scale().base(2.0), y.log_scale())?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("bytes of a write or page")
        .y_desc("Gbit/s")
        .x_label_formatter(&|len| bytes(*len))
        .max_light_lines(2)
        .draw()?;
    for (kind, colour) in [("single", BLUE), ("paged", RED)] {
        let points: Vec<_> =
            rows.iter().filter(|row| row.kind == kind).map(|row| (row.bytes as f64, row.gbit_per_s)).collect();
        let dots = points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
        chart.draw_series(dots)?;
        let line = chart.draw_series(LineSeries::new(points, colour))?;
        line.label(kind).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
    }
    chart.configure_series_labels().border_style(BLACK).background_style(WHITE).draw()?;
    Ok(area.present()?)
}
