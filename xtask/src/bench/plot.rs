//! Line plots as SVG.

use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const MARGIN: f64 = 60.0;
const COLOURS: [&str; 6] = ["#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#444444"];

/// A named line.
pub struct PlotLine {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// Draws lines over an axis that starts at 0 and an axis from 0 to 1.
pub fn shares(title: &str, x_label: &str, y_label: &str, lines: &[PlotLine]) -> String {
    drawn(title, x_label, y_label, lines, 1.0)
}

/// Draws lines over two axes that start at 0; the second ends at a round number.
pub fn amounts(title: &str, x_label: &str, y_label: &str, lines: &[PlotLine]) -> String {
    let most = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    drawn(title, x_label, y_label, lines, round_above(most))
}

/// The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is not below a number.
fn round_above(number: f64) -> f64 {
    if number <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(number.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    steps.into_iter().map(|step| step * power).find(|round| *round >= number).unwrap_or(number)
}

fn drawn(title: &str, x_label: &str, y_label: &str, lines: &[PlotLine], top: f64) -> String {
    let most =
        lines.iter().flat_map(|line| &line.points).map(|point| point.0).fold(f64::MIN_POSITIVE, f64::max);
    let x = |value: f64| MARGIN + value / most * (WIDTH - 2.0 * MARGIN);
    let y = |value: f64| HEIGHT - MARGIN - value / top * (HEIGHT - 2.0 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{}\" y=\"24\" text-anchor=\"middle\" font-size=\"15\">{}</text>\n",
        WIDTH / 2.0,
        escaped(title)
    );
    for step in 0..=5 {
        let share = step as f64 / 5.0;
        let (at, height, value) = (y(top * share), top * share, most * share);
        let _ = write!(
            svg,
            "<line x1=\"{MARGIN}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\n\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{height:.1}</text>\n\
             <text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{value:.0}</text>\n",
            WIDTH - MARGIN,
            MARGIN - 8.0,
            at + 4.0,
            x(value),
            HEIGHT - MARGIN + 18.0
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
         <text x=\"16\" y=\"{}\" transform=\"rotate(-90 16 {})\" text-anchor=\"middle\">{}</text>\n",
        WIDTH / 2.0,
        HEIGHT - 16.0,
        escaped(x_label),
        HEIGHT / 2.0,
        HEIGHT / 2.0,
        escaped(y_label)
    );
    for (number, line) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let points: Vec<String> =
            line.points.iter().map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" fill=\"{colour}\">{}</text>",
            MARGIN + 12.0,
            MARGIN + 4.0 + 16.0 * number as f64,
            escaped(&line.name)
        );
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_of_every_line_is_drawn_inside() {
        let line =
            |name: &str, points: &[(f64, f64)]| PlotLine { name: name.into(), points: points.to_vec() };
        let svg = shares(
            "a < b",
            "x",
            "y",
            &[line("one", &[(0.0, 0.0), (50.0, 1.0)]), line("two", &[(25.0, 0.5)])],
        );
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("60.0,340.0 580.0,60.0") && svg.contains("320.0,200.0"), "{svg}");
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn amounts_end_at_a_round_number_above_all() {
        let line = PlotLine { name: "one".into(), points: vec![(0.0, 0.0), (10.0, 4.2)] };
        let svg = amounts("a", "x", "y", &[line]);
        assert!(svg.contains(">5.0</text>") && svg.contains("60.0,340.0 580.0,104.8"), "{svg}");
        for (number, round) in [(0.0, 1.0), (1.0, 1.0), (1.01, 2.0), (2.2, 2.5), (7.0, 10.0), (130.0, 200.0)]
        {
            assert_eq!(round_above(number), round, "{number}");
        }
    }
}
