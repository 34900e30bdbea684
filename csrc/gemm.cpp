#include "gemm.h"

#include <algorithm>
#include <stdexcept>

#include "tile.h"

namespace octavo {

namespace {

// How many rows each thread packs for itself, which saves a barrier, before packing is shared out.
constexpr int64_t kFewRows = 4;
// So many tiles that it pays to unpack a panel once for all of them, and the most bytes that an unpacked one may take.
constexpr int64_t kFastTiles = 3, kExactTiles = 2, kUnpackedBytes = 1 << 21;
// Packed activations that one piece of work goes over again for each panel: they should stay in L2.
constexpr int64_t kBlockBytes = 384 * 1024;

// M rows cut into tiles of nearly equal height, since a high and a flat one cost more than two medium ones.
struct Tiles {
    int64_t M, count;
    Tiles(int64_t rows, int most) : M(rows), count((rows + most - 1) / most) {}
    int64_t first(int64_t tile) const { return tile * M / count; }
    int rows(int64_t tile) const { return int(first(tile + 1) - first(tile)); }
};

// One call over parts that share an arithmetic.
struct Job {
    const float* x;
    int64_t ldx, M, K;
    const Weight* const* parts;
    int n_parts;
    TileOut out;  // at row 0 and the first part's first column
    bool fast;
    Tiles tiles;
    int64_t row_bytes;

    Job(const float* x, int64_t ldx, int64_t M, const Weight* const* parts, int n_parts, const TileOut& out, bool fast)
        : x(x), ldx(ldx), M(M), K(parts[0]->K), parts(parts), n_parts(n_parts), out(out), fast(fast),
          tiles(M, fast ? kFastRows : kExactRows), row_bytes(fast ? fast_row_bytes(K) : K * 4) {}

    Unpacked unpacked_of(Type type, int rows) const {
        return fast ? fast_unpacked(type, rows) : exact_unpacked(type, rows, K);
    }

    void pack_tile(int64_t tile, uint8_t* packed) const {
        const int64_t row = tiles.first(tile);
        uint8_t* to = packed + row * row_bytes;
        if (fast)
            pack_fast(x + row * ldx, ldx, tiles.rows(tile), K, to);
        else
            pack_exact(x + row * ldx, ldx, tiles.rows(tile), K, (float*)to);
    }

    // Panels [from, to) of part w, whose first column is column0, against tiles [tile0, tile1).
    void multiply(const Weight& w, int64_t column0, int64_t from, int64_t to, int64_t tile0, int64_t tile1,
                  const uint8_t* packed, Buffer& spare) const {
        const bool shared = !is_float(w.type) && tile1 - tile0 >= (fast ? kFastTiles : kExactTiles) &&
                            unpacked_bytes(fast, K) <= kUnpackedBytes;
        uint8_t* unpacked = shared ? spare.reserve(size_t(unpacked_bytes(fast, K))) : nullptr;
        for (int64_t p = from; p < to;) {
            const int panels = M == 1 && to - p >= kWide ? kWide : kNarrow;
            const bool all = to - p >= panels;
            TileOut o = out;
            const int64_t column = column0 + p * NR;
            if (o.bias) o.bias += column;
            o.columns = std::min<int64_t>(w.N, to * NR) - p * NR;
            if (shared) {
                const Unpacked u = unpacked_of(w.type, tiles.rows(tile0));
                u.unpack(w.panel(p), all ? w.panel_bytes : 0, K, unpacked);
            }
            for (int64_t t = tile0; t < tile1; t++) {
                const int64_t row = tiles.first(t);
                o.y = out.y + row * out.ldy + column;
                if (o.residual) o.residual = out.residual + row * out.ldr + column;
                o.ahead = t == tile0 && p + panels < w.panels ? panels * w.panel_bytes : 0;
                if (shared) {
                    const Unpacked u = unpacked_of(w.type, tiles.rows(t));
                    o.ahead = 0;
                    const bool more = t == tile0 && p + panels < w.panels;
                    o.next = more ? w.panel(p + panels) : nullptr;
                    o.next_bytes = more ? std::min<int64_t>(panels, w.panels - p - panels) * w.panel_bytes : 0;
                    u.tile(unpacked, u.panel_bytes, packed + row * row_bytes, K, o);
                } else {
                    const TileFn fn = (fast ? fast_tile : exact_tile)(w.type, tiles.rows(t), panels);
                    fn(w.panel(p), all ? w.panel_bytes : 0, packed + row * row_bytes, K, o);
                }
            }
            p += panels;
        }
    }
};

// Panels of one piece: pieces enough to keep threads busy to the end, an even number of panels in each.
int64_t piece_panels(int64_t panels, int64_t blocks, int threads) {
    if (threads == 1) return panels;
    const int64_t pieces = threads * std::clamp<int64_t>(panels * blocks / (threads * 6), 1, 16);
    const int64_t size = (panels * blocks + pieces - 1) / pieces;
    return std::max<int64_t>((size + 1) / 2 * 2, 2);
}

// Runs all pieces 0..n-1, each once.  Every thread has a run of successive pieces, so that what it prefetches at the
// end of one is what it works on next; whoever has finished his own helps the others with theirs.
template <class F> void run_pieces(Threads& threads, Workspace& work, int64_t n, F&& fn) {
    const int count = threads.count();
    auto first = [&](int w) { return w * n / count; };
    for (int w = 0; w < count; w++) work.workers[w].next.store(first(w), std::memory_order_relaxed);
    threads.parallel_for(n, [&](int64_t, int worker) {  // n turns; each finds a piece, as n pieces are there
        for (int i = 0; i < count; i++) {
            const int w = (worker + i) % count;
            std::atomic<int64_t>& next = work.workers[w].next;
            if (next.load(std::memory_order_relaxed) >= first(w + 1)) continue;
            const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
            if (piece < first(w + 1)) return fn(piece, worker);
        }
    });
}

void run(Threads& threads, const Job& job, Workspace& work) {
    int64_t panels = 0;
    for (int i = 0; i < job.n_parts; i++) panels += job.parts[i]->panels;
    const int64_t tiles = job.tiles.count;
    const int64_t block_tiles = std::clamp<int64_t>(
        kBlockBytes / (job.row_bytes * ((job.M + tiles - 1) / tiles)), 1, tiles);
    const int64_t blocks = (tiles + block_tiles - 1) / block_tiles;
    const int64_t size = piece_panels(panels, blocks, threads.count());

    // Pieces are numbered block by block, part by part.
    int64_t per_block = 0;
    for (int i = 0; i < job.n_parts; i++) per_block += (job.parts[i]->panels + size - 1) / size;
    auto piece_of = [&](int64_t piece, const uint8_t* packed, int worker) {
        const int64_t block = piece / per_block;
        int64_t rest = piece % per_block, column = 0;
        for (int i = 0; i < job.n_parts; i++) {
            const Weight& w = *job.parts[i];
            const int64_t here = (w.panels + size - 1) / size;
            if (rest < here) {
                job.multiply(w, column, rest * size, std::min(w.panels, (rest + 1) * size), block * block_tiles,
                             std::min(tiles, (block + 1) * block_tiles), packed, work.workers[worker].unpacked);
                return;
            }
            rest -= here;
            column += w.N;
        }
    };

    work.begin(threads.count());
    const size_t bytes = size_t(job.M * job.row_bytes);
    if (job.M == 1 && !job.fast) {  // a single row is already in the packed order
        run_pieces(threads, work, per_block, [&](int64_t piece, int worker) { piece_of(piece, (const uint8_t*)job.x, worker); });
    } else if (job.M <= kFewRows) {
        run_pieces(threads, work, blocks * per_block, [&](int64_t piece, int worker) {
            Workspace::Worker& mine = work.workers[worker];
            uint8_t* packed = mine.own.reserve(bytes);
            if (!mine.packed) {
                for (int64_t t = 0; t < tiles; t++) job.pack_tile(t, packed);
                mine.packed = true;
            }
            piece_of(piece, packed, worker);
        });
    } else {
        uint8_t* packed = work.shared.reserve(bytes);
        threads.parallel_for(tiles, [&](int64_t t, int) { job.pack_tile(t, packed); });
        run_pieces(threads, work, blocks * per_block, [&](int64_t piece, int worker) { piece_of(piece, packed, worker); });
    }
}

}  // namespace

void gemm(Threads& threads, const float* x, int64_t ldx, int64_t M, const Weight* const* parts, int n_parts,
          const float* bias, const float* residual, int64_t ldr, float* y, int64_t ldy, Mode mode, Workspace& work) {
    if (M == 0) return;
    for (int i = 1; i < n_parts; i++)
        if (parts[i]->K != parts[0]->K) throw std::invalid_argument("the weights of one linear must share their columns");
    auto fast = [&](int i) { return mode == Mode::fast && !is_float(parts[i]->type); };
    int64_t column = 0;
    for (int i = 0; i < n_parts;) {
        int end = i;
        int64_t width = 0;
        for (; end < n_parts && fast(end) == fast(i); end++) width += parts[end]->N;
        const TileOut out{y + column, ldy, bias ? bias + column : nullptr, residual ? residual + column : nullptr, ldr, 0, 0, nullptr, 0};
        run(threads, Job(x, ldx, M, parts + i, end - i, out, fast(i)), work);
        column += width;
        i = end;
    }
}

}  // namespace octavo
