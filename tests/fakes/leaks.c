/* Leaks 16 MiB in one way at each line that it reads, and answers with a line; as a library, at each call of leak. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void leak(const char *way, const char *name, size_t size) {
    char *memory = NULL;
    if (!strcmp(way, "malloc")) {
        for (size_t done = 0; done < size; done += 4096)
            memset(malloc(4096), 1, 4096);
        return;
    }
    if (!strcmp(way, "mmap"))
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    else {
        int file = !strcmp(way, "memfd") ? memfd_create("leak", 0) : open(name, O_RDWR | O_CREAT, 0600);
        if (file < 0 || ftruncate(file, size))
            exit(1);
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (memory == MAP_FAILED)
        exit(1);
    memset(memory, 1, size);
}

int main(int count, char **given) {
    char line[16];
    while (count == 3 && fgets(line, sizeof line, stdin)) {
        leak(given[1], given[2], 16 << 20);
        puts("done");
        fflush(stdout);
    }
    return 0;
}
