# Trident. `make quickstart` and `make check` do everything from a bare machine on; `make help` lists the rest.
# On the command line can be set: CC, OPT, BLAS_LIBS, SANITIZE, BUILD (a directory for objects and programs), JOBS,
# LLMC (a checkout of llm.c, for make bench).
ifeq ($(origin CC),default)
CC = gcc
endif
BUILD ?= build/cpu
SANITIZE ?=
OPT ?= -O3 -g
JOBS ?= $(shell nproc)
BLAS_DIR := $(firstword $(wildcard /usr/lib/*/openblas-openmp))
BLAS_LIBS ?= -L$(BLAS_DIR) -Wl,-rpath,$(BLAS_DIR) -lopenblas
WARNINGS = -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Wno-psabi
# No contraction and no reordering: the same bits from every compiler's code on every host that has the same units.
override CFLAGS += -std=c11 -D_GNU_SOURCE -I. $(OPT) $(WARNINGS) -ffp-contract=off -fno-math-errno \
	-fno-strict-aliasing $(SANITIZE)
override LDFLAGS += $(SANITIZE)
LDLIBS = $(BLAS_LIBS) -ljansson -lxxhash -lpcre2-8 -lm -ldl -lpthread
AGAIN = $(MAKE) --no-print-directory -j$(JOBS)

FOLDERS = train data parallel kernels base
sources = $(wildcard $(1)/*.c $(1)/cpu/*.c)
objects = $(patsubst %.c,$(BUILD)/obj/%.o,$(filter-out train/main.c,$(call sources,$(1))))
LIBS = $(FOLDERS:%=$(BUILD)/lib%.a)
TESTS = $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/*/test_*.c))
FUZZERS = $(patsubst tests/fuzz/%.c,$(BUILD)/tests/%,$(wildcard tests/fuzz/fuzz_*.c))
BENCHES = $(patsubst scripts/bench/%.c,$(BUILD)/bench/%,$(wildcard scripts/bench/*_bench.c))

# ---- the program ----

# ./trident is the default build's, whatever is built elsewhere.
all: $(BUILD)/trident
	@[ $(BUILD) != build/cpu ] || ln -sfn $(BUILD)/trident trident

$(BUILD)/trident: $(BUILD)/obj/train/main.o $(LIBS)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

define folder_library
$(BUILD)/lib$(1).a: $(call objects,$(1))
	@rm -f $$@
	ar rcs $$@ $$^
endef
$(foreach folder,$(FOLDERS),$(eval $(call folder_library,$(folder))))

# Files named *_avx2.c and *_avx512.c are the only ones that may use these instructions; elsewhere they are empty, and
# compilers refuse the flags.
ifneq ($(filter x86_64%,$(shell $(CC) -dumpmachine)),)
$(BUILD)/obj/%_avx2.o: override CFLAGS += -mavx2 -mfma
$(BUILD)/obj/%_avx512.o: override CFLAGS += -mavx2 -mfma -mavx512f -mavx512vl -mavx512bw -mavx512dq
endif
$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

# Changes when the compiler or its flags do: then all is compiled again. Says what is missing before the first error.
FLAGS_TEXT := $(CC) $(CFLAGS) $(LDFLAGS) $(LDLIBS)
$(BUILD)/flags: FORCE
	@command -v $(CC) >/dev/null && [ -n "$(BLAS_DIR)$(filter command line environment,$(origin BLAS_LIBS))" ] || \
		{ echo "$(CC) or OpenBLAS (libopenblas-openmp-dev) is not installed: scripts/setup.sh installs what is missing" >&2; exit 1; }
	@printf '%s\n' '#include <jansson.h>' '#include <xxhash.h>' '#define PCRE2_CODE_UNIT_WIDTH 8' '#include <pcre2.h>' | \
		$(CC) $(CFLAGS) -E -x c - >/dev/null 2>&1 || \
		{ echo "jansson.h, xxhash.h or pcre2.h is not there: scripts/setup.sh installs what is missing" >&2; exit 1; }
	@mkdir -p $(@D)
	@echo '$(FLAGS_TEXT)' | cmp -s - $@ || echo '$(FLAGS_TEXT)' >$@

# ---- tests ----

tests: $(TESTS)
# tests/unit/FOLDER/test_X.c is linked with FOLDER's library and those below it only.
define test_program
$(BUILD)/tests/$(1)/%: $(BUILD)/obj/tests/unit/$(1)/%.o $(2:%=$(BUILD)/lib%.a)
	@mkdir -p $$(@D)
	$$(CC) $$(LDFLAGS) -o $$@ $$^ $$(LDLIBS) $$(shell pkg-config --libs check)
endef
$(eval $(call test_program,base,base))
$(eval $(call test_program,kernels,kernels base))
$(eval $(call test_program,parallel,parallel base))
$(eval $(call test_program,data,data base))
$(eval $(call test_program,train,$(FOLDERS)))

fuzzers: $(FUZZERS)
$(BUILD)/tests/fuzz_%: $(BUILD)/obj/tests/fuzz/fuzz_%.o $(LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $^ $(LDLIBS)

# clang's build with AddressSanitizer and UBSan serves the unit tests and the fuzzers; clang warns on its way.
ASAN = BUILD=build/asan CC=clang-14 OPT="-O1 -g" SANITIZE="-fsanitize=fuzzer-no-link,address,undefined \
	-fno-sanitize-recover=undefined -fno-omit-frame-pointer"
TSAN = BUILD=build/tsan OPT="-O1 -g" SANITIZE="-fsanitize=thread"
asan:
	+@$(AGAIN) $(ASAN) tests fuzzers build/asan/trident
tsan:
	+@$(AGAIN) $(TSAN) $(patsubst tests/unit/%.c,build/tsan/tests/%,$(wildcard tests/unit/base/*.c \
		tests/unit/kernels/test_*.c tests/unit/data/test_*.c tests/unit/parallel/test_*.c))
clang:
	+@$(AGAIN) BUILD=build/clang CC=clang-14 tests build/clang/trident

check:
	@scripts/setup.sh check
	+@$(AGAIN) all tests
	+@$(AGAIN) asan
	+@$(AGAIN) tsan
	@scripts/run_tests.py

# The full matrices, unit tests as clang optimises them, and a minute for each fuzzer: hours.
check-long:
	@scripts/setup.sh check
	+@$(AGAIN) all tests
	+@$(AGAIN) asan
	+@$(AGAIN) tsan
	+@$(AGAIN) clang
	@scripts/run_tests.py --long

tidy:
	@tests/tidy/tidy.py

format:
	clang-format-14 -i $$(git ls-files --cached --others --exclude-standard '*.c' '*.h')

# ---- the rest ----

setup:
	@scripts/setup.sh build

quickstart:
	@scripts/quickstart.sh

benches: $(BENCHES)
$(BUILD)/bench/%: $(BUILD)/obj/scripts/bench/%.o $(LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
bench:
	@scripts/setup.sh bench
	+@$(AGAIN) all benches
	@scripts/bench/run.py --build $(BUILD) $(if $(LLMC),--llmc '$(LLMC)')

clean:
	rm -rf build trident

help:
	@echo "make              build/cpu/trident, linked to ./trident"
	@echo "make quickstart   set up, build, prepare text, train on 8 processes, show the result"
	@echo "make check        set up, build, all tests; make check-long: the full matrices, and fuzzing"
	@echo "make bench        speed, against other programs and against the machine's limits; LLMC=DIR: and against llm.c"
	@echo "make tidy         form of the code; make format: puts it into the project's format"
	@echo "make asan         build/asan: tests and fuzzers with AddressSanitizer and UBSan; make tsan: ThreadSanitizer"
	@echo "make setup        install what building needs; make clean: remove build/"
	@echo "one kind of test  scripts/run_tests.py --kind unit --only comm   (after make check, or make all tests)"
	@echo "other settings    make CC=clang-14 BUILD=build/clang; make BLAS_LIBS=-lblis"

FORCE:
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
.PHONY: all tests fuzzers asan tsan clang check check-long tidy format setup quickstart benches bench clean help FORCE
.SECONDARY:
