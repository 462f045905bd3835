/* test_threads.c - the kernels' own threads: each index once, from any caller, after a fork, and no others'. */
#include "tests/unit/kernels/reference.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cpu/common.h"

enum { COUNT_MAX = 64 };

typedef struct {
    atomic_int calls[COUNT_MAX];
    int64_t nested; /* indexes that each index shares out in turn */
} Calls;

static void count_call(void *args, int64_t index) { atomic_fetch_add(&((Calls *)args)->calls[index], 1); }

static void count_nested(void *args, int64_t index) {
    Calls *calls = args, inner = {0};
    share_chunks(calls->nested, count_call, &inner);
    for (int64_t i = 0; i < calls->nested; i++) {
        if (atomic_load(&inner.calls[i]) != 1) return; /* not counted: seen by the caller */
    }
    count_call(args, index);
}

/* Many short jobs: workers come late, to a job that is over, and must not touch the next one. */
static int64_t wrong_after_jobs(TestRandom *r, int64_t jobs) {
    int64_t wrong = 0;
    for (int64_t j = 0; j < jobs; j++) {
        Calls calls = {.nested = random_int(r, 4)};
        const int64_t count = random_int(r, COUNT_MAX + 1), kind = random_int(r, 4);
        (kind % 2 == 0 ? share_chunks : share_tasks)(count, kind < 2 ? count_call : count_nested, &calls);
        for (int64_t i = 0; i < COUNT_MAX; i++) wrong += atomic_load(&calls.calls[i]) != (i < count);
        if (random_int(r, 500) == 0) usleep(200); /* workers fall asleep */
    }
    return wrong;
}

START_TEST(every_job_runs_once) {
    TestRandom r = test_random("every_job_runs_once");
    for (int threads = 2; threads <= 5; threads++) {
        kernels_init(threads);
        ck_assert_int_eq(wrong_after_jobs(&r, 5000), 0);
    }
}
END_TEST

static void *run_jobs(void *seed) {
    TestRandom r = {(uint64_t)(uintptr_t)seed, 0};
    return (void *)(uintptr_t)wrong_after_jobs(&r, 3000);
}

START_TEST(several_callers_at_once) {
    TestRandom r = test_random("several_callers_at_once");
    kernels_init(3);
    pthread_t callers[3];
    for (uintptr_t i = 0; i < 3; i++) {
        ck_assert_int_eq(pthread_create(&callers[i], NULL, run_jobs, (void *)((uintptr_t)r.seed + i)), 0);
    }
    for (int i = 0; i < 3; i++) {
        void *wrong;
        pthread_join(callers[i], &wrong);
        ck_assert_uint_eq((uintptr_t)wrong, 0);
    }
}
END_TEST

static int threads_of_process(void) {
    DIR *tasks = opendir("/proc/self/task");
    ck_assert_ptr_nonnull(tasks);
    int threads = 0;
    for (const struct dirent *entry; (entry = readdir(tasks));) threads += entry->d_name[0] != '.';
    closedir(tasks);
    return threads;
}

#ifndef __SANITIZE_THREAD__
START_TEST(a_forked_process_has_threads_of_its_own) {
    TestRandom r = test_random("a_forked_process_has_threads_of_its_own");
    kernels_init(3);
    ck_assert_int_eq(wrong_after_jobs(&r, 100), 0);
    const pid_t child = fork();
    if (child == 0) { /* asserts of check write to the parent's file */
        alarm(30);
        _exit(wrong_after_jobs(&r, 100) != 0 ? 1 : threads_of_process() != 3 ? 2 : 0);
    }
    ck_assert_int_eq(wrong_after_jobs(&r, 100), 0);
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child's wait status is %d", status);
}
END_TEST
#endif

/* fp64 products go through the BLAS, from all threads at once: right numbers, and none of the BLAS's threads. */
START_TEST(products_of_the_blas_at_once) {
    TestRandom r = test_random("products_of_the_blas_at_once");
    enum { M = 200, N = 150, K = 120, ROUNDS = 100 };
    double *a = random_array(&r, M * K, 1.0, DT_F64), *b = random_array(&r, K * N, 1.0, DT_F64);
    double *one = xcalloc(M * N, sizeof(double)), *many = xcalloc(M * N, sizeof(double));
    kernels_init(1);
    matmul(one, N, a, K, false, b, N, false, M, N, K, false, NULL, DT_F64, NULL);
    kernels_init(3);
    ck_assert_int_eq(wrong_after_jobs(&r, 100), 0);
    const int before = threads_of_process();
    for (int round = 0; round < ROUNDS; round++) {
        memset(many, 0, M * N * sizeof(double));
        matmul(many, N, a, K, false, b, N, false, M, N, K, false, NULL, DT_F64, NULL);
        ck_assert_mem_eq(many, one, M * N * sizeof(double));
    }
    ck_assert_int_eq(threads_of_process(), before);
    free(a);
    free(b);
    free(one);
    free(many);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("threads");
    TCase *tcase = tcase_create("threads");
    tcase_set_timeout(tcase, 30);
    tcase_add_test(tcase, every_job_runs_once);
    tcase_add_test(tcase, several_callers_at_once);
#ifndef __SANITIZE_THREAD__ /* it ends a fork's child that starts threads */
    tcase_add_test(tcase, a_forked_process_has_threads_of_its_own);
#endif
    tcase_add_test(tcase, products_of_the_blas_at_once);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
