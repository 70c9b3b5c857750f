/* Who holds how much of which card: one file that every process of a stand-in card maps.
 *
 * tests/card/card.py creates the file and knows its layout. The CUDA stand-ins write to it, NVML's stand-in reads it. */

#ifndef LEDGER_H
#define LEDGER_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CARDS = 8, MAX_HOLDERS = 256 };
#define LEDGER_MAGIC 0x6865616472636172ull

typedef struct {
  _Atomic int pid; /* 0: free */
  int padding;
  _Atomic unsigned long long died_at; /* seconds, monotonic; 0: alive when last looked at */
  _Atomic unsigned long long bytes[MAX_CARDS];
} Holder;

typedef struct {
  unsigned long long magic, cards, context_bytes, collective_bytes, reclaim_seconds;
  unsigned long long total[MAX_CARDS]; /* what processes can take: without what the driver reserves */
  _Atomic unsigned long long used[MAX_CARDS];
  Holder holders[MAX_HOLDERS];
} Ledger;

static Ledger *open_ledger(const char *path) {
  int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return 0;
  Ledger *ledger = mmap(0, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (ledger == MAP_FAILED) return 0;
  if (ledger->magic == LEDGER_MAGIC) return ledger;
  munmap(ledger, sizeof *ledger);
  return 0;
}

static unsigned long long ledger_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (unsigned long long)now.tv_sec + 1;
}

/* Give back what dead processes held, once they are dead for the set time. */
static void reclaim(Ledger *ledger) {
  for (int i = 0; i < MAX_HOLDERS; i++) {
    Holder *holder = &ledger->holders[i];
    int pid = holder->pid;
    if (!pid || !kill(pid, 0) || errno != ESRCH) continue;
    unsigned long long alive = 0;
    atomic_compare_exchange_strong(&holder->died_at, &alive, ledger_now());
    if (ledger_now() - holder->died_at < ledger->reclaim_seconds) continue;
    if (!atomic_compare_exchange_strong(&holder->pid, &pid, -1)) continue; /* another process is doing it */
    for (int card = 0; card < MAX_CARDS; card++)
      ledger->used[card] -= atomic_exchange(&holder->bytes[card], 0);
    holder->died_at = 0;
    holder->pid = 0;
  }
}

#endif
