"""Figures from result files: what is drawn is what the results hold, and what they lack is said."""

import subprocess
import sys

import numpy as np
import pytest
from figure_results import content, figure, put, rising, told, vectors
from small_runs import command

from bespoke.errors import UserError
from bespoke.report import planes
from bespoke.report.papers import Line, Lines, Words, line_chart
from bespoke.tables import figures, probes, spec

ROWS = """
[[row]]
id = "fedavg"
label = "FedAvg"
view = "global"
[[row]]
id = "pfedfda"
label = "pFedFDA"
"""
CELL = """
[[cell]]
id = "a"
label = "digits, first"
base = "small"
"""


def lines(axes):
    """The lines of a panel by label: (x, y)."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axes.get_lines()}


def words(drawn):
    """All that is written outside the panels: title, subtitle, caption."""
    return "\n".join(text.get_text() for text in drawn.texts).replace("\n", " ")


def picture(table, root):
    drawn, missing = figures.picture(table, root)
    drawn.canvas.draw()  # what cannot be laid out fails here
    return drawn, missing


# --- lines ----------------------------------------------------------------------------------------------------------


def test_curves_are_the_means_of_the_seeds_with_a_band_and_a_panel_for_each_cell(tmp_path):
    text = 'figure = "curves"\n' + ROWS + CELL + CELL.replace('"a"', '"b"').replace("first", "second")
    table = figure(tmp_path, text + 'stand_in = "digits for letters"\npublished = { pfedfda = 76.93 }\n')
    for seed, top in ((0, 0.7), (1, 0.9)):
        curve = rising([2, 4], top)
        put(tmp_path / "r", table, "a/fedavg", seed, **content(curve["pooled"][-1:] * 4, curve=curve))
    put(tmp_path / "r", table, "a/pfedfda", **content([0.8] * 4, curve=rising([2, 4], 0.8)))
    put(tmp_path / "r", table, "b/pfedfda", **content([0.8] * 4, curve=rising([1, 3, 5], 0.5)))
    drawn, missing = picture(table, tmp_path / "r")
    first, second = drawn.axes
    own = [rising([2, 4], top)["pooled"] for top in (0.7, 0.9)]
    assert lines(first)["FedAvg"][0] == [2, 4]
    assert lines(first)["FedAvg"][1] == pytest.approx(100 * np.mean(own, axis=0), rel=1e-6)
    (band,) = first.collections
    edges = band.get_paths()[0].vertices
    assert (edges[:, 1].min(), edges[:, 1].max()) == pytest.approx((100 * own[0][0], 100 * own[1][1]), rel=1e-6)
    assert list(lines(second)) == ["pFedFDA"] and lines(second)["pFedFDA"][0] == [1, 3, 5]
    assert first.get_lines()[1].get_color() == second.get_lines()[0].get_color()  # a method keeps its colour
    assert (first.get_xlabel(), first.get_ylabel()) == ("round", "test accuracy in %")
    assert [axes.get_title("left") for axes in drawn.axes] == ["digits, first", "digits, second (stand-in)"]
    assert missing == ["digits, second (stand-in), FedAvg: not run yet"]
    for fact in (
        "Paper, Figure 1: What it shows",
        "4 clients (all clients of the training population)",
        "seeds 0, 1, not all of them",
    ):
        assert fact in words(drawn)
    for fact in ("global models of FedAvg, personal models of pFedFDA", "NVIDIA H200 in bf16"):
        assert fact in words(drawn)
    assert "The paper prints: digits, second (stand-in), pFedFDA 76.93." in words(drawn)
    assert "STAND-IN: digits for letters." in words(drawn) and f"MISSING: {missing[0]}." in words(drawn)


def test_what_a_figure_shows_of_its_curves_can_be_chosen(tmp_path):
    table = figure(tmp_path, 'figure = "curves"\noptions = { show = ["mean", "train_loss"] }\n' + ROWS + CELL)
    curve = rising(range(1, 31), 0.8) | {"mean": [0.25] * 30}
    curve["train_loss"][3] = None
    put(tmp_path / "r", table, "a/fedavg", **content([0.5], curve=curve))
    put(tmp_path / "r", table, "a/pfedfda", **content([0.5], curve={**curve, "train_loss": [None] * 30}))
    drawn, missing = picture(table, tmp_path / "r")
    assert [axes.get_ylabel() for axes in drawn.axes] == ["mean test accuracy in %", "training loss"]
    assert lines(drawn.axes[0])["FedAvg"][1] == [25.0] * 30
    (left,) = lines(drawn.axes[1]).values()
    assert left[0] == [1, 2, 3, *range(5, 31)]
    assert left[1][3] == pytest.approx(curve["train_loss"][4], rel=1e-6)
    assert missing == ["digits, first, pFedFDA: its result holds no train_loss by round"]
    assert "One run per line." in words(drawn)


def test_a_figure_without_curves_says_so(tmp_path):
    table = figure(tmp_path, 'figure = "curves"\n' + ROWS + CELL)
    put(tmp_path / "r", table, "a/fedavg", **content([0.5], curve=rising([], 0.5)))
    with pytest.raises(UserError, match="no run was evaluated in several rounds"):
        picture(table, tmp_path / "r")


def test_epochs_come_from_the_settings_and_panels_from_what_else_differs(tmp_path):
    cell = '[[cell]]\nid = "{0}{1}"\nlabel = "{0}, part, E = {1}"\nbase = "small"\nset = [{2}"training.epochs={1}"]\n'
    cells = [cell.format(name, e, other) for name, other in (("x", ""), ("y", '"data.keep=0.5", ')) for e in (5, 1)]
    table = figure(tmp_path, 'figure = "epochs"\n' + ROWS + "".join(cells))
    for name, base in (("x", 0.2), ("y", 0.6)):
        for e in (1, 5):
            put(tmp_path / "r", table, f"{name}{e}/pfedfda", **content([base + e / 100, base]))
    drawn, missing = picture(table, tmp_path / "r")
    assert [axes.get_title("left") for axes in drawn.axes] == ["x, part", "y, part"]
    assert lines(drawn.axes[0]) == {"pFedFDA": ([1, 5], pytest.approx([20.5, 22.5]))}
    assert lines(drawn.axes[1]) == {"pFedFDA": ([1, 5], pytest.approx([60.5, 62.5]))}
    assert len(missing) == 4 and "Test accuracy, pooled over all test rows, last round; 2 clients" in words(drawn)


def test_rows_come_from_what_was_changed_for_the_evaluation(tmp_path):
    cell = '[[cell]]\nid = "k{0}"\nlabel = "digits, {0}"\nbase = "small"\ngroup = "new"\n'
    cell += 'evaluate = ["data.keep_rows={0}", "data.keep_clients=new"]\n'
    table = figure(tmp_path, 'figure = "rows"\n' + ROWS + "".join(cell.format(k) for k in (10, 2, 100)))
    for k, value in ((2, 0.3), (10, 0.5), (100, 0.6)):
        told = content([0.9, value])
        told["clients"]["group"] = ["train", "new"]
        put(tmp_path / "r", table, f"k{k}/pfedfda", **told)
    drawn, _ = picture(table, tmp_path / "r")
    assert lines(drawn.axes[0]) == {"pFedFDA": ([2, 10, 100], pytest.approx([30, 50, 60]))}
    assert drawn.axes[0].get_xscale() == "log"
    assert [text.get_text() for text in drawn.axes[0].get_xticklabels()] == ["2", "10", "100"]
    assert "1 clients (new clients, held out from training)" in words(drawn)


def test_estimates_beside_the_hierarchy_are_drawn_after_the_methods(tmp_path):
    cell = '[[cell]]\nid = "v{0}"\nlabel = "variance {0}"\nbase = "small"\nset = ["data.between={0}"]\n'
    text = 'figure = "hierarchy"\nstatistic = "mean"\n' + ROWS + "".join(cell.format(v) for v in (0.01, 1.0))
    table = figure(tmp_path, text)
    run = '[data]\nname = "synthetic_hierarchy"\n[model]\nname = "linear"\n[objective]\nname = "mean_estimation"\n'
    (tmp_path / "paper" / "small.toml").write_text(run)
    for v in (0.01, 1.0):
        for row, error in (("fedavg", v), ("pfedfda", v / 2)):
            told = content([0, 0], probe={"hierarchy": {"local": 0.02, "paper": v / 10, "bayes": v / 20}})
            told |= {"metric": "squared_error", "higher": {"squared_error": False}}
            told["clients"]["metrics"] = {"squared_error": {"sum": [error, 3 * error], "weight": [1, 1]}}
            put(tmp_path / "r", table, f"v{v}/{row}", **told)
    drawn, _ = picture(table, tmp_path / "r")
    (axes,) = drawn.axes
    found = lines(axes)
    assert list(found)[:2] == ["FedAvg", "pFedFDA"] and len(found) == 5
    assert found["FedAvg"] == ([0.01, 1.0], pytest.approx([0.02, 2.0]))
    assert found["Bayes estimate (oracle)"] == ([0.01, 1.0], pytest.approx([0.0005, 0.05]))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_ylabel() == "test squared error, mean over clients"


def test_gaussianity_has_a_panel_for_each_split_from_round_0(tmp_path):
    table = figure(tmp_path, 'figure = "gaussianity"\n' + ROWS + CELL)
    fit = {"round": [0, 10, 20], "test": {"nll": [5, None, 7]}, "train": {"nll": [4, 5, 6]}}
    put(tmp_path / "r", table, "a/fedavg", **content([0.5], probe={"gaussianity": fit}))
    put(tmp_path / "r", table, "a/pfedfda", **content([0.5]))
    drawn, missing = picture(table, tmp_path / "r")
    assert [lines(axes) for axes in drawn.axes] == [{"FedAvg": ([0, 20], [5, 7])}, {"FedAvg": ([0, 10, 20], [4, 5, 6])}]
    assert missing == ["digits, first, pFedFDA: its result holds no gaussianity"]
    (tmp_path / "r/paper/f1/a/fedavg/0.json").unlink()
    with pytest.raises(UserError, match=r"no result .* holds gaussianity: make them with bespoke sweep paper/f1"):
        picture(table, tmp_path / "r")


def test_unknown_values_are_left_out_of_mean_and_band():
    line = Line([1, 2, 3], np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan]]))
    drawn = line_chart([Lines("", "x", "y", {"a": line, "b": line})], Words("", ""))
    assert lines(drawn.axes[0])["a"] == ([1, 2], [2.0, 4.0])


# --- points ---------------------------------------------------------------------------------------------------------


def dots(axes):
    """Places and areas of a panel's dots, those of one colour after the other."""
    found = axes.collections
    return np.concatenate([np.asarray(each.get_offsets()) for each in found]), np.concatenate(
        [each.get_sizes() for each in found]
    )


@pytest.fixture
def no_tsne(monkeypatch):
    """t-SNE takes long and is tested by itself: here it is the last two columns."""
    for module in (figures, planes):
        monkeypatch.setattr(module, "tsne", lambda found: np.asarray(found)[:, -2:])
    monkeypatch.setitem(figures._PLANES, "t-SNE", lambda found: np.asarray(found)[:, -2:])


def test_embeddings_are_drawn_twice_and_larger_where_the_level_is_higher(tmp_path, no_tsne):
    table = figure(tmp_path, 'figure = "embeddings"\n' + ROWS + CELL)
    found, conditions = vectors(["noise", "jitter", "imbalance"], 4, 6, 5.0)
    put(tmp_path / "r", table, "a/pfedfda", **content([0.5] * 12, probe={"embeddings": told(found, conditions, 0.437)}))
    drawn, _ = picture(table, tmp_path / "r")
    by_pca, by_tsne = drawn.axes
    places, areas = dots(by_pca)
    assert places == pytest.approx(planes.plane(np.round(found, 4)), abs=1e-3)
    assert dots(by_tsne)[0] == pytest.approx(found[:, -2:], abs=1e-3)
    noise, jitter, imbalance = areas.reshape(3, 4)
    assert (np.diff(noise) > 0).all() and len({*jitter}) == 1
    assert imbalance[0] == imbalance[1] > imbalance[2]  # a small alpha is a strong imbalance
    assert len({tuple(each.get_facecolor()[0]) for each in by_pca.collections}) == 3
    assert [axes.get_title("left") for axes in drawn.axes] == ["PCA", "t-SNE"]
    assert "t-SNE with perplexity 4, seed 0; silhouette of the conditions: 0.44;" in words(drawn)


def test_norms_have_a_column_for_each_layer(tmp_path, no_tsne):
    table = figure(tmp_path, 'figure = "norms"\n' + ROWS + CELL)
    each = [vectors(["noise", "imbalance"], 4, 5, apart) for apart in (0.1, 1.0, 9.0)]
    layers = [{"layer": n, "name": f"norm{n}", **told(*own, n / 100)} for n, own in zip((1, 12, 21), each, strict=True)]
    put(tmp_path / "r", table, "a/pfedfda", **content([0.5] * 8, probe={"norms": {"layers": layers, "of": 21}}))
    drawn, _ = picture(table, tmp_path / "r")
    titles = [axes.get_title("left") for axes in drawn.axes]
    assert titles[0] == "PCA, norm layer 1 (norm1)" and titles[5] == "t-SNE, norm layer 21 (norm21)"
    assert dots(drawn.axes[1])[0] == pytest.approx(planes.plane(np.round(each[1][0], 4)), abs=1e-3)
    assert dots(drawn.axes[5])[0] == pytest.approx(each[2][0][:, -2:], abs=1e-3)
    assert "layer 1 0.01, layer 12 0.12, layer 21 0.21" in words(drawn)


def test_features_have_a_panel_for_each_method_and_a_colour_for_each_class(tmp_path, no_tsne):
    table = figure(tmp_path, 'figure = "features"\n' + ROWS + CELL)
    draw = np.random.default_rng(0)
    for row, share in (("fedavg", 0.5), ("pfedfda", 0.75)):
        own = {"vectors": draw.standard_normal((12, 4)).tolist(), "classes": [2, 0, 1] * 4, "clients": [0, 1] * 6}
        own |= {"kept": 0.934, "scatter": {"between_classes": 1.234, "between_clients": share}}
        put(tmp_path / "r", table, f"a/{row}", **content([share] * 4, probe={"features": own}))
    drawn, _ = picture(table, tmp_path / "r")
    titles = [axes.get_title("left") for axes in drawn.axes]
    assert titles == [
        "FedAvg (50.0 %)\nscatter: classes 1.23, clients 0.50",
        "pFedFDA (75.0 %)\nscatter: classes 1.23, clients 0.75",
    ]
    places, _ = dots(drawn.axes[1])
    assert places == pytest.approx(np.array(own["vectors"])[np.argsort(own["classes"], kind="stable"), -2:])
    assert [len(each.get_offsets()) for each in drawn.axes[0].collections] == [4, 4, 4]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["class 0", "class 1", "class 2"]
    assert "12 train rows after the last round, in 4 principal components with at least 93 %" in words(drawn)


def test_tsne_keeps_clusters_together_and_gives_the_same_each_time():
    found, _ = vectors(["noise", "jitter"], 10, 8, 20.0)
    flat = planes.tsne(found)
    assert flat.shape == (20, 2) and np.array_equal(flat, planes.tsne(found))
    middle = flat.reshape(2, 10, 2).mean(axis=1)
    spread = np.abs(flat.reshape(2, 10, 2) - middle[:, None]).max()
    assert np.linalg.norm(middle[0] - middle[1]) > 2 * spread
    assert planes.perplexity(20) == 6 and planes.perplexity(1000) == 30 and planes.perplexity(4) == 2
    assert planes.tsne(np.ones((5, 3))).tolist() == [[0.0, 0.0]] * 5
    assert planes.tsne(np.arange(6.0).reshape(3, 2)).shape == (3, 2)


# --- clients and rows -----------------------------------------------------------------------------------------------


def beta_result(means, covs, conditions):
    told = content([0.5] * len(means))
    told["clients"] |= {"condition": conditions, "logged": {"beta_mean": means, "beta_cov": covs}}
    return told


def test_betas_are_sorted_by_the_mean_of_their_kind_over_all_seeds(tmp_path):
    table = figure(tmp_path, 'figure = "betas"\n' + ROWS + CELL)
    conditions = ["contrast:1", "contrast:5", "clean"]
    for seed, shift in ((0, 0.0), (1, 0.1)):
        betas = [0.5 + shift, 0.9 - shift, 0.2 + shift]
        put(tmp_path / "r", table, "a/pfedfda", seed, **beta_result(betas, betas, conditions))
    drawn, _ = picture(table, tmp_path / "r")
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["clean (1)", "contrast (2)"]
    assert [sorted(each.get_offsets()[:, 0]) for each in axes.collections] == [
        pytest.approx([0.2, 0.3]),
        pytest.approx([0.5, 0.6, 0.8, 0.9]),
    ]
    assert {"0.25", "0.70"} < {text.get_text() for text in axes.texts}  # the means
    put(tmp_path / "s", table, "a/pfedfda", **beta_result([0.1, 0.2, 0.3], [0.4, None, 0.6], conditions))
    drawn, missing = picture(table, tmp_path / "s")
    assert [axes.get_xlabel() for axes in drawn.axes] == ["beta of the means", "beta of the covariance"]
    assert missing == ["digits, first, FedAvg: not run yet"]
    put(tmp_path / "t", table, "a/fedavg", **content([0.5]))
    with pytest.raises(UserError, match="no result holds betas"):
        picture(table, tmp_path / "t")


def test_a_histogram_counts_the_clients_of_a_seed(tmp_path):
    table = figure(tmp_path, 'figure = "histogram"\n' + ROWS + CELL)
    put(tmp_path / "r", table, "a/fedavg", 0, **content([0.0, 0.5, 0.51, 1.0]))
    put(tmp_path / "r", table, "a/fedavg", 1, **content([0.5, 0.5]))
    put(tmp_path / "r", table, "a/pfedfda", 0, **content([1.0, 0.0]))
    drawn, _ = picture(table, tmp_path / "r")
    heights = [[bar.get_height() for bar in axes.patches] for axes in drawn.axes]
    assert len(heights[0]) == 20
    assert {i: h for i, h in enumerate(heights[0]) if h} == {0: 0.5, 10: 2.0, 19: 0.5}
    assert {i: h for i, h in enumerate(heights[1]) if h} == {0: 1.0, 19: 1.0}
    assert drawn.axes[0].get_title("left") == "FedAvg: mean 50.2 %"
    assert drawn.axes[0].get_ylim() == drawn.axes[1].get_ylim()


def test_bubbles_are_the_partitions_own_and_missing_data_is_said(tmp_path):
    cell = '[[cell]]\nid = "{0}"\nlabel = "{1}"\nkind = "benchmark"\nhow = "partition"\nbase = "small"\n'
    cells = cell.format("b1", "six") + 'set = ["data.clients=6"]\n' + cell.format("b2", "nowhere")
    elsewhere = ("name=files", "path=nothing/*.npz", "partition=natural", "min_rows=1", "clients=0")
    cells += f"set = {[f'data.{each}' for each in elsewhere]}\n"
    table = figure(tmp_path, 'figure = "bubbles"\n' + cells + cell.format("b3", "third") + 'missing = "not at hand"\n')
    drawn, missing = picture(table, tmp_path / "r")
    (axes,) = drawn.axes
    assert axes.get_title("left").startswith("six (largest bubble: ")
    (bubbles,) = axes.collections
    clients, classes = bubbles.get_offsets().T
    assert {*clients.astype(int)} == set(range(6)) and {*classes.astype(int)} <= set(range(10))
    largest = int(axes.get_title("left").split(": ")[1].split()[0])
    assert bubbles.get_sizes().sum() / bubbles.get_sizes().max() * largest == pytest.approx(1797)  # all rows
    assert missing[0] == "third: not at hand" and "no file matches" in missing[1]
    with pytest.raises(UserError, match=r"paper/f2 cannot be drawn: third: not at hand"):
        text = 'figure = "bubbles"\n' + cell.format("b3", "third") + 'missing = "not at hand"\n'
        picture(figure(tmp_path, text, "f2"), tmp_path / "r")


# --- files and mistakes ---------------------------------------------------------------------------------------------


def test_both_files_are_written_or_the_one_that_is_named(tmp_path, monkeypatch):
    table = figure(tmp_path, 'figure = "histogram"\n' + ROWS + CELL)
    put(tmp_path / "r", table, "a/fedavg", **content([0.5, 0.7]))
    monkeypatch.chdir(tmp_path)
    told = command("figure", str(table.path), "--results", "r")
    assert (told.code, told.out.split()) == (0, ["paper_f1.png", "paper_f1.pdf"])
    assert told.err == "missing: digits, first, pFedFDA: not run yet\n"
    assert (tmp_path / "paper_f1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "paper_f1.pdf").read_bytes().startswith(b"%PDF")
    (tmp_path / "there").mkdir()
    paths, _ = figures.draw(str(table.path), tmp_path / "r", tmp_path / "there")
    assert [path.name for path in paths] == ["paper_f1.png", "paper_f1.pdf"] and all(path.exists() for path in paths)
    assert command("figure", str(table.path), "--results", "r", "-o", "mine.svg").out == "mine.svg\n"
    assert (tmp_path / "mine.svg").read_text().count("<svg") == 1 and not (tmp_path / "mine.pdf").exists()
    for path in paths:
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()  # the same chart gives the same bytes


def test_a_folder_that_is_not_there_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "SUFFIXES", (".svg",))
    path = str(figure(tmp_path, 'figure = "histogram"\n' + ROWS + CELL).path)
    with pytest.raises(UserError, match="there is no folder"):
        figures.draw(path, tmp_path / "r", tmp_path / "new")
    assert not (tmp_path / "new").exists()  # nothing is drawn, nothing is left
    put(tmp_path / "r", spec.find(path), "a/fedavg", **content([0.5, 0.7]))
    figures.draw(path, tmp_path / "r", tmp_path / "new/inner")
    assert (tmp_path / "new/inner/paper_f1.svg").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot make the folder .*file: File exists; choose another one"):
        figures.draw(path, tmp_path / "r", tmp_path / "file")


def test_a_figure_that_cannot_be_drawn_says_why_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(figure(tmp_path, 'figure = "curves"\n' + ROWS + CELL).path)
    assert command("figure", path, "--results", "r").sentence.startswith("there is no folder r: name that of the res")
    (tmp_path / "r").mkdir()
    sentence = command("figure", path, "--results", "r").sentence
    assert sentence == "paper/f1 has no results in r: make them with bespoke sweep paper/f1"
    table = figure(tmp_path, 'figure = "curves"\n' + ROWS + CELL)
    put(tmp_path / "r", table, "a/fedavg", status="failed", error="the memory is too small")
    sentence = command("figure", path, "--results", "r").sentence
    assert "has no results in r (digits, first, FedAvg: failed: the memory is too small): make them" in sentence
    assert "must end in .png, .svg or .pdf" in command("figure", path, "-o", "chart.bmp").sentence
    figure(tmp_path, 'figure = "curve"\n' + ROWS + CELL)
    assert "nothing draws 'curve' (did you mean 'curves'?)" in command("figure", path).sentence
    other = tmp_path / "paper/tables/t1.toml"
    other.write_text('paper = "Paper"\nsource = "Table 1"\ntitle = "Accuracy"\n')
    assert command("figure", str(other)).sentence == "paper/t1 is a table: print it with bespoke table paper/t1"


def test_results_with_other_settings_are_left_out_and_counted(tmp_path):
    table = figure(tmp_path, 'figure = "histogram"\n' + ROWS + CELL)
    for row, seed in (("fedavg", 0), ("fedavg", 1), ("pfedfda", 0)):
        put(tmp_path / "r", table, f"a/{row}", seed, **content([0.5, 0.7]))
    table = figure(tmp_path, 'figure = "histogram"\n' + ROWS + CELL + 'set = ["training.lr=0.7"]\n')
    made = "made with other settings than the table has now, or read otherwise, and"
    with pytest.raises(UserError, match=rf"paper/f1 has no results in .* \(3 results were {made} are left out"):
        picture(table, tmp_path / "r")
    put(tmp_path / "r", table, "a/fedavg", 0, **content([0.25, 0.25]))
    drawn, missing = picture(table, tmp_path / "r")
    assert [axes.get_title("left") for axes in drawn.axes] == ["FedAvg: mean 25.0 %"]
    again = "bespoke sweep paper/f1 --seeds 0 1 makes them again"
    assert missing == [f"2 results were {made} are left out: {again}"]
    assert f"MISSING: {missing[0]}." in words(drawn)


def test_results_of_older_source_are_named(tmp_path):
    table = figure(tmp_path, 'figure = "histogram"\n' + ROWS + CELL)
    older = {"method": "0" * 12, "modules": ["bespoke.algorithms.fedavg"], "commit": None}
    put(tmp_path / "r", table, "a/fedavg", **content([0.5, 0.7], source=older))
    put(tmp_path / "r", table, "a/pfedfda", **content([0.5, 0.7]))
    drawn, _ = picture(table, tmp_path / "r")
    assert "From older source code of the method: digits, first, FedAvg." in words(drawn)


def test_figures_are_imported_without_torch():
    """It is imported once a result is checked against the figure's settings."""
    script = "import sys; from bespoke.tables import figures; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_shipped_figure_can_be_drawn_once_it_has_results():
    shipped = [spec.find(name) for name in spec.listed()]
    drawn = [table for table in shipped if table.kind == "figure"]
    assert len(drawn) >= 14 and {table.figure for table in drawn} == figures.FIGURES.keys()
    for table in drawn:
        for cell in table.cells:
            needed = table.figure if table.figure in probes.PROBES else ""
            assert cell.probe == needed, f"{table.name}: {cell.id}"
        assert table.options.keys() <= {"show", "x"}, table.name
        assert set(table.options.get("show", ())) <= figures._CURVES.keys(), table.name
    assert {*spec.PROBES} == {*probes.PROBES}
