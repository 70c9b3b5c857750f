/* A volume that stops answering: opening a file below $STUCK waits while there is a file $STUCK.stuck, or $STUCK_BY. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_for(const char *path) {
    const char *folder = getenv("STUCK");
    char flag[4096];
    if (folder == NULL || strncmp(path, folder, strlen(folder)) != 0) return;
    const char *by = getenv("STUCK_BY");
    snprintf(flag, sizeof flag, "%s%s", by ? by : folder, by ? "" : ".stuck");
    while (access(flag, F_OK) == 0) usleep(10000);
}

int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (real == NULL) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    wait_for(path);
    return real(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open64(path, flags, mode);
}
