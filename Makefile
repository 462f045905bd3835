# Trident. `make` builds build/cpu/trident; `make quickstart` and `make check` do everything from a
# bare machine. BUILD, CC, CFLAGS, BLAS_LIBS and SANITIZE can be set on the command line.
CC ?= gcc
BUILD ?= build/cpu
SANITIZE ?=
OPT ?= -O3 -g
BLAS_DIR := $(shell ls -d /usr/lib/*/openblas-openmp 2>/dev/null | head -1)
BLAS_LIBS ?= -L$(BLAS_DIR) -Wl,-rpath,$(BLAS_DIR) -lopenblas
WARNINGS = -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Wno-psabi
override CFLAGS += -std=c11 -D_GNU_SOURCE -I. $(OPT) $(WARNINGS) -fopenmp -ffp-contract=off -fno-math-errno -fno-strict-aliasing $(SANITIZE)
override LDFLAGS += -fopenmp $(SANITIZE)
LDLIBS = $(BLAS_LIBS) -ljansson -lxxhash -lpcre2-8 -lm -ldl -lpthread
ARCH := $(shell uname -m)

FOLDERS = train data parallel kernels base
sources = $(wildcard $(1)/*.c $(1)/cpu/*.c)
objects = $(patsubst %.c,$(BUILD)/obj/%.o,$(filter-out train/main.c,$(call sources,$(1))))
LIBS = $(FOLDERS:%=$(BUILD)/lib%.a)
TESTS = $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/*/test_*.c))

all: $(BUILD)/trident
	@ln -sfn $(BUILD)/trident trident

$(BUILD)/trident: $(BUILD)/obj/train/main.o $(LIBS)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

define folder_library
$(BUILD)/lib$(1).a: $(call objects,$(1))
	@rm -f $$@
	ar rcs $$@ $$^
endef
$(foreach folder,$(FOLDERS),$(eval $(call folder_library,$(folder))))

# Files named *_avx2.c and *_avx512.c are the only ones that may use these instructions.
$(BUILD)/obj/%_avx2.o: override CFLAGS += -mavx2 -mfma
$(BUILD)/obj/%_avx512.o: override CFLAGS += -mavx2 -mfma -mavx512f -mavx512vl -mavx512bw -mavx512dq
$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

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

setup:
	@scripts/setup.sh build

# Two at a time: a test of whole runs starts up to eight ranks, but most of its time one thing waits for another.
check:
	@scripts/setup.sh check
	@$(MAKE) -j2 all tests
	@scripts/list_tests.sh $(BUILD)
	cd $(BUILD) && TRIDENT=$(CURDIR)/$(BUILD)/trident ctest -j2 --output-on-failure

# The full matrices, then a minute of fuzzing of every reader.
check-long:
	@scripts/setup.sh check
	@$(MAKE) -j2 all tests fuzz
	@TRIDENT_TEST_LIMIT_S=36000 scripts/list_tests.sh $(BUILD)
	cd $(BUILD) && TRIDENT_LONG=1 TRIDENT=$(CURDIR)/$(BUILD)/trident ctest -j2 --output-on-failure
	@for f in $(FUZZERS); do echo "$$f"; (cd build/fuzz && $(CURDIR)/$$f -max_total_time=60 -print_final_stats=1) || exit 1; done

FUZZERS = $(patsubst tests/fuzz/%.c,build/fuzz/tests/%,$(wildcard tests/fuzz/fuzz_*.c))
fuzz:
	@$(MAKE) BUILD=build/fuzz CC=clang-14 OPT="-O1 -g" \
		SANITIZE="-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -Wno-error=unused-command-line-argument" $(FUZZERS)
build/fuzz/tests/fuzz_%: build/fuzz/obj/tests/fuzz/fuzz_%.o $(FOLDERS:%=build/fuzz/lib%.a)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $^ $(LDLIBS)

quickstart:
	@scripts/quickstart.sh

clean:
	rm -rf build trident

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
.PHONY: all tests setup check check-long fuzz quickstart clean
.SECONDARY:
