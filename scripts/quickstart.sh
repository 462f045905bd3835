#!/bin/sh
# Trains configs/quickstart.ini on eight processes, from a bare machine on: set-up, build, text, training, result.
set -eu
cd "$(dirname "$0")/.."
text=quickstart-data
run=runs/quickstart

scripts/setup.sh build
make -s -j2 all
if ! [ -e "$text/train.idx" ] || ! [ -e "$text/valid.idx" ]; then
    /usr/bin/python3 scripts/prepare_text.py "$text"
    for part in train valid; do
        ./trident tokenize --tokenizer bytes --document-line '<|document|>' --out "$text/$part" "$text/$part.txt"
    done
fi

status=0
./trident train configs/quickstart.ini "$@" || status=$?
if [ "$status" = 75 ]; then
    echo "Stopped and saved. \`make quickstart\` goes on from there."
    exit 75
fi
[ "$status" = 0 ] || exit "$status"

/usr/bin/python3 scripts/plot_loss.py "$run/log/metrics.jsonl"
echo
echo "A passage by the model; another --seed gives another one:"
words="--checkpoint $run/checkpoints --tokens 400 --temperature 0.8 --seed 1"
echo "./trident generate $words --prompt \"And it came to pass\""
echo
./trident generate $words --prompt "And it came to pass"
cat <<END

checkpoints  $run/checkpoints; what is in them: ./trident inspect $run/checkpoints
log          $run/log/metrics.jsonl; with TensorBoard: tensorboard --logdir $run/log
settings     configs/quickstart.ini; all settings: ./trident help

To try next:
  ./trident selftest configs/quickstart.ini            the same numbers on one process and on this grid of eight?
  ./trident configs/quickstart.ini --set train.steps=900      goes on from the checkpoint, 300 steps more
  ./trident configs/quickstart.ini --set parallel.pipeline=4 --set parallel.data=1 --set log.dir=runs/other \\
      --set checkpoint.dir=runs/other                   the same training in another layout: the same losses
To train anew: rm -r $run
END
