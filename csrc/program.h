// A decoder as a list of operators, run over one step's tokens in one call.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "kv.h"
#include "pack.h"
#include "sample.h"
#include "threads.h"

namespace octavo {

// Owns: the threads and the working memory that all calls share, one call at a time.
struct Cpu {
    Cpu(int count, Mode mode) : threads(count), mode(mode) {}

    Threads threads;
    Mode mode;
    Arena weights;
    std::mutex busy;
    Workspace gemm;
    AttentionSpace attention;
    std::deque<Buffer> rope;
    std::deque<SampleSpace> sampling;
};

// One step's inputs; octavo.kernels.backend.Batch defines the arrays.
struct Step {
    int64_t M, S, R;
    const int32_t *tokens, *positions, *starts, *logits_at;
    std::vector<Table> tables;
    uint8_t* blocks;
    int64_t pool;  // blocks in it
};

using Vector = std::vector<float>;

// How many rows a value has, and which are alive at a time.
enum class Extent {
    tile,    // a row for each token, used only near where it is made: memory for one tile of tokens
    tokens,  // a row for each token
    logits,  // a row for each wanted row of logits
};

// Owns: the operators, their weights and the memory of the values between them.
//
// Operators are cut into segments that each row passes through alone, so a segment runs a tile of tokens at a time and
// what lies between its operators stays in cache.  Attention begins a segment: by then all keys are written.  Values
// are numbers into the buffers that `buffer` makes.  Shapes are checked when an operator is added, a step when it is
// run: bad ones throw std::invalid_argument, and nothing has been written.
class Program {
  public:
    Program(std::shared_ptr<Cpu> cpu, const KVLayout& layout, int groups, int heads, int row_tile);
    Program(const Program&) = delete;  // operators hold its address
    Program& operator=(const Program&) = delete;

    int buffer(int64_t width, Extent extent);
    void segment(bool logit_rows);

    void embed(int out, std::shared_ptr<Weight> table, float scale);
    void norm(int out, int x, Vector weight, float eps, int residual);
    void linear(int out, int x, std::vector<std::shared_ptr<Weight>> parts, Vector bias, int residual);
    void rope_write(int out, int qkv, int group, int place, Vector inv_freq, float scale, Vector q_norm, Vector k_norm,
                    float eps);
    void attend(int out, int q, int group, int place, float scale, int window, float softcap);
    void gate(int out, int x, const std::string& activation);
    void pick(int out, int x);
    void output(int x, float softcap);

    // Logits [R, vocabulary()]; the memory is kept alive by the pointer and overwritten by the next run.
    std::shared_ptr<Buffer> run(const Step& step);
    int64_t vocabulary() const { return vocabulary_; }
    const KVLayout& layout() const { return layout_; }
    int64_t workspace_bytes() const;

  private:
    struct Value {
        int64_t width, ld;
        Extent extent;
        std::shared_ptr<Buffer> memory;
    };
    struct Rope {
        Vector inv_freq;
        float scale;
        Buffer angles;
    };
    // Rows first .. last-1 of the step, the op's own kind of rows.
    struct Span { int64_t first, last; int64_t count() const { return last - first; } };
    using Op = std::function<void(const Step&, Span)>;
    struct Segment { bool logit_rows; std::vector<Op> ops; };

    const Value& value(int id) const;
    float* at(int id, Span span) const;
    void add(Op op);
    void expect_width(int id, int64_t width, const char* what) const;
    int rope(const Vector& inv_freq, float scale);
    void check(const Step& step) const;
    void check_row(const Step& step, int64_t s) const;
    void check_table(const Step& step, int64_t s, size_t group) const;
    void prepare(const Step& step);

    std::shared_ptr<Cpu> cpu_;
    KVLayout layout_;
    int heads_;
    int64_t row_tile_, vocabulary_ = 0, embed_rows_ = 0;
    std::vector<Value> values_;
    std::vector<Segment> segments_;
    std::deque<Rope> ropes_;
    std::vector<int> windows_;  // of each group: the widest that an operator uses; 0 full, -1 group unused
    std::vector<std::vector<int32_t>> block_of_;  // [group][token]
    int output_ = -1;
};

}  // namespace octavo
