"""datatrove's LanguageFilter on the documents of a JSONL file, with a given fastText model.

Usage: datatrove_langid.py DOCUMENTS.jsonl MODEL.bin. Prints one JSON line: CPU seconds and the
label of each document.
"""

import json
import sys
import time

from datatrove.data import Document
from datatrove.pipeline.filters import LanguageFilter
from fasttext.FastText import _FastText

path, model = sys.argv[1:]
# It insists on one distribution of fastText by name; another one is installed here.
LanguageFilter._requires_dependencies = []
step = LanguageFilter(label_only=True)
# The file in place of a download: the rest is datatrove's own.
step.model._model = _FastText(model)
with open(path) as file:
    docs = [Document(text=json.loads(line)["text"], id=str(i)) for i, line in enumerate(file)]
step.filter(Document(text="warm up", id="-"))
start = time.process_time()
for doc in docs:
    step.filter(doc)
seconds = time.process_time() - start
labels = [doc.metadata["language"] for doc in docs]
print(json.dumps({"cpu_s": seconds, "labels": labels}))
