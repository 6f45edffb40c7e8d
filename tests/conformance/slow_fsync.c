/* Preloaded into a server: every fsync and fdatasync takes 20 ms longer, as on a busy disk, and leaves a trace that it did. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void wait_and_trace(void) {
    const struct timespec pause = {0, 20 * 1000 * 1000};
    const char *trace = getenv("SLOW_FSYNC_TRACE");
    nanosleep(&pause, NULL);
    if (trace != NULL) {
        int file = open(trace, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file >= 0) {
            ssize_t written = write(file, "s", 1);
            (void)written;
            close(file);
        }
    }
}

int fsync(int file) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    wait_and_trace();
    return real(file);
}

int fdatasync(int file) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    wait_and_trace();
    return real(file);
}
