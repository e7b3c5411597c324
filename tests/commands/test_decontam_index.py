import json

from stepwell.cli import main


def test_a_folder_stands_for_the_rows_below_it(tmp_path, capsys):
    question = "which of these rivers runs through the old town and under its stone bridge"
    for place in ("quiz/rivers.jsonl", "quiz/more/towns.jsonl", "quiz/README.md"):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"question": question, "answer": "the Avon"}) + "\n")
    assert main(["decontam-index", str(tmp_path / "quiz"), "--out", str(tmp_path / "index")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["more-towns: 1 item", "rivers: 1 item"]
    (tmp_path / "none").mkdir()
    assert main(["decontam-index", str(tmp_path / "none"), "--out", str(tmp_path / "other")]) == 3
    assert "holds no benchmark" in capsys.readouterr().err
