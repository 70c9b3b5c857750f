/* The time of day, moved by the seconds that the file $STEPPED holds; all other clocks are as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME) {
        FILE *stepped = fopen(getenv("STEPPED"), "r");
        long seconds = 0;
        if (stepped) {
            if (fscanf(stepped, "%ld", &seconds) == 1)
                now->tv_sec += seconds;
            fclose(stepped);
        }
    }
    return status;
}
