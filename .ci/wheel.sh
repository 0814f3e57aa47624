set -euo pipefail
# As a user installs it: a wheel, and nothing of the clone. Its dependencies are those that CI's
# environment has, by a .pth file, which does not lead on to that one's own rloo: what is proven is
# that the wheel has all of the package and its data, and the command, not that an index has the rest.
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$WORK/source" # which a build leaves files in
cp -r pyproject.toml README.md LICENSE src "$WORK/source"
python -m pip wheel -q --no-deps -w "$WORK/wheel" "$WORK/source"
python3 -m venv "$WORK/user"
"$WORK/user/bin/python" -m pip install -q --no-deps "$WORK"/wheel/rloo-*.whl
"$WORK/user/bin/python" - "$packages" <<'END'
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "dependencies.pth").write_text(sys.argv[1])
END
cd "$WORK/user"
bin/rloo launch --backend slurm --dry_run >job.sbatch
bin/rloo train --max_steps 2 --num_prompts 4 --eval_size 16
bin/rloo eval runs/countdown/config.yaml --model runs/countdown --eval_size 16
bin/python - <<'END'
import pathlib, sys, rloo
package = pathlib.Path(rloo.__file__).parent
assert package.is_relative_to(sys.prefix), package
assert (package / "py.typed").is_file()
END
