package admission

import (
	"reflect"
	"testing"
)

// A method that changes the pool and is not recorded would make every
// recording a lie, so each method is known to be one or the other.
func TestEveryCallThatChangesThePoolIsRecorded(t *testing.T) {
	reads := map[string]bool{"Config": true, "EstimatePrompt": true, "EstimateMedia": true, "Free": true, "Held": true, "Hot": true, "Info": true, "NextWake": true, "Proven": true, "Stats": true, "Takeable": true, "View": true, "Costs": true}
	pool, rec := reflect.TypeFor[*Pool](), reflect.TypeFor[*Recorder]()
	seen := map[Op]bool{}
	r := Record(New(Config{}), func(c *Call) { seen[c.Op] = true })
	r.Join(0, ReplicaSpec{ID: 1, Warm: true})
	calls := 1
	for i := range pool.NumMethod() {
		name := pool.Method(i).Name
		if reads[name] || name == "Join" {
			continue
		}
		m, _ := rec.MethodByName(name)
		args := []reflect.Value{reflect.ValueOf(r)}
		x := &Ticket{}
		switch name { // bring the ticket to where the call is allowed
		case "First", "Progress", "Done":
			r.Pool.Admit(1, x)
		case "Leave":
			continue // see below
		}
		for k := 1; k < m.Type.NumIn(); k++ {
			v := reflect.New(m.Type.In(k)).Elem()
			switch {
			case v.Type() == reflect.TypeFor[*Ticket]():
				v = reflect.ValueOf(x)
			case v.Type() == reflect.TypeFor[End]():
				v = reflect.ValueOf(End{Outcome: Cancelled})
			case v.Kind() == reflect.Float64:
				v.SetFloat(1)
			}
			args = append(args, v)
		}
		m.Func.Call(args)
		calls++
		if len(seen) != calls {
			t.Errorf("%s changes the pool and is not recorded (or reads only: then say so here)", name)
			calls = len(seen)
		}
	}
	if _, own := reflect.TypeFor[*Recorder]().MethodByName("Leave"); !own {
		t.Error("Leave is not recorded")
	}
}
