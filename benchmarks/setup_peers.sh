#!/usr/bin/env bash
# Environments of the libraries that the benchmark compares with, each its own, because litgpt and
# torchtitan pin packages that current Transformers and TRL don't work with. Those that are there
# already are left alone. Usage: setup_peers.sh FOLDER
set -euo pipefail
folder=${1:?usage: setup_peers.sh FOLDER}
torch=${TORCH:-torch==2.13.0}

make_env() { # name, packages...
  local env="$folder/$1"
  shift
  [ -e "$env/complete" ] && return
  echo "Setting up $env"
  python3 -m venv "$env"
  local pip=("$env/bin/pip" install --quiet --disable-pip-version-check)
  "${pip[@]}" $torch
  "$env/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
    >"$env/constraints.txt"
  "${pip[@]}" --constraint "$env/constraints.txt" "$@"
  touch "$env/complete"
}

make_light_env() { # name, packages...; without torch
  local env="$folder/$1"
  shift
  [ -e "$env/complete" ] && return
  echo "Setting up $env"
  python3 -m venv "$env"
  "$env/bin/pip" install --quiet --disable-pip-version-check "$@"
  touch "$env/complete"
}

mkdir -p "$folder"
make_env trl transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 trl==1.16.0
make_env litgpt litgpt==0.5.13
make_env torchtitan torchtitan==0.3.0 triton
make_light_env datatrove datatrove==0.10.0 spacy==3.8.18 nltk==3.10.4 tldextract regex xxhash==3.6.0 tokenizers \
  fasttext-community fasteners
# TRL dropped PPO after this version; it runs in the environment of the newer one.
if [ ! -e "$folder/trl-1.12.0/complete" ]; then
  echo "Setting up $folder/trl-1.12.0"
  "$folder/trl/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    --target "$folder/trl-1.12.0" trl==1.12.0
  touch "$folder/trl-1.12.0/complete"
fi
